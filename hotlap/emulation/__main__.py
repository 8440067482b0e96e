"""`python -m hotlap.emulation REQUEST RESULT`: the child process of `call`. Both are JSON files."""

import json
import sys
from pathlib import Path

from hotlap.emulation.child import answer

if __name__ == "__main__":
    request, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(answer(json.loads(request.read_text()))))
