"""What a run would need, before it runs: memory, FLOPs, bytes on the wire, time and cost.

Pure functions of a configuration and a machine. Nothing here touches a device; the model is built on
torch's meta device, where tensors have shapes and dtypes but no memory.
"""
