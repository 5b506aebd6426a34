"""The Hugging Face Hub: upload a finished folder, fetch the files beside a base model's weights."""

from __future__ import annotations

from pathlib import Path

from streammerge.errors import StorageError, StreammergeError, UsageError

__all__ = ["local_folder", "upload"]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.index.json")


def local_folder(folder_or_repo: Path | str) -> Path:
    """A folder as it is; a repository id such as ``Qwen/Qwen2.5-7B`` from the cache or the Hub, without weights.

    Honours ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and the cache variables.

    Raises:
        UsageError: it is neither a folder nor a repository that can be had.
    """
    path = Path(folder_or_repo)
    if path.is_dir():
        return path
    name = str(folder_or_repo)
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise UsageError(f"{name} is not a folder")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, ignore_patterns=list(_WEIGHTS)))
    except StreammergeError:  # a stop on request
        raise
    except Exception as fault:  # the client raises what its HTTP layer raises
        raise UsageError(f"{name} is neither a folder nor a repository that can be fetched: {fault}") from fault


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a finished folder and return the address of the commit.

    Honours ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``. Running it again goes on where it was.

    Raises:
        StorageError: the upload failed; the folder is complete all the same.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi(library_name="streammerge")
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            folder_path=folder,
            repo_id=made.repo_id,
            commit_message="Upload merged model",
            ignore_patterns=[".streammerge.json"],
        )
    except StreammergeError:  # a stop on request
        raise
    except Exception as fault:  # the client raises what its HTTP layer raises
        raise StorageError(f"{folder} is complete, but could not be uploaded to {repo}: {fault}") from fault
    return str(commit.commit_url)
