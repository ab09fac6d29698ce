"""What `job=verify` has found to differ, as its file says it; needs no torch."""

import json
from pathlib import Path


def verdict(run: Path) -> str:
    """What differs, of the comparison in the folder of a run; empty where nothing does, or none came to an end."""
    path = run / "verify" / "verify.json"
    found = json.loads(path.read_text()) if path.is_file() else {"same": True}
    return "" if found["same"] else f"{found['verdict']} ({path})"
