"""The commands, one module each.

A command module has `configure(parser)`, which declares its arguments, and `run(args)`, which returns the
exit code. Modules are imported only when their command is called, and import torch only inside `run`.
"""
