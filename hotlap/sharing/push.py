"""Uploads an exported directory to the Hugging Face hub, as one commit.

Goes through `huggingface_hub`, which honors `HF_ENDPOINT` and `HF_TOKEN`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hotlap.errors import ConfigError, HubError


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a repository, before anything is exported."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
        found = "" if name.count("/") == 1 else f"`{name}`"
    except HFValidationError as error:
        found = str(error)
    if found:
        raise ConfigError(
            expected="--push-to-hub with USER/MODEL, of letters, digits, `-`, `_` and `.`",
            found=found,
            do="give the name that the model has or shall have on the hub",
        )


def push(directory: Path, name: str, *, private: bool) -> str:
    """Upload every file, into a new repository or on top of an old one. Returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        address = hub.create_repo(name, private=private or None, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=directory, commit_message="Export from Hotlap")
    except Exception as error:  # which ones depends on the library's version
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise HubError(
            expected=f"to upload {name} to the Hugging Face hub",
            found=f"{type(error).__name__}: {' '.join(lines)[:200]}",
            do=f"log in with `hf auth login`, check the network, then `hf upload {name} {directory}`;"
            f" the export is complete in {directory}",
        ) from error
    return str(address)
