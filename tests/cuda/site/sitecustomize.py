"""Python imports this when it starts with this directory on its path, and so in child processes too."""

from tests.cuda.process import set_up

set_up()
