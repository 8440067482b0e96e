"""Models in other programs' forms: a repository for `transformers`, a GGUF file, and the Hugging Face hub.

Each form is written into a directory, read back and compared with the model before the directory gets its
name. `modeling_hotlap.py` goes into a repository as it is, and imports nothing of Hotlap.
"""
