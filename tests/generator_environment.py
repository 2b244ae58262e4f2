"""A Python environment as a generator's is: its engine and the light part of the package, without ray, hydra and the learner's packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

LEFT_OUT = (
    "ray",
    "hydra",
    "omegaconf",
    "accelerate",
    "tensorboard",
    "megatron",
    "torchtitan",
    "hypothesis",
    "pytest",
    "_pytest",
)


def build(folder: Path) -> Path:
    """A real virtual environment whose packages are those of this one but for the ones left out; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = folder / "lib" / version / "site-packages"
    for source in {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))}:
        for entry in source.iterdir():
            name = entry.name.lower().replace("-", "_")
            wanted = not any(name == left_out or name.startswith((f"{left_out}_", f"{left_out}.", f"{left_out}-")) for left_out in LEFT_OUT)
            if wanted and not name.startswith("asyncrl") and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
