#!/usr/bin/env bash
# All tests that need a GPU, in at most 8 minutes; figures as JSON into $1 (default build/gpu.json).
set -euo pipefail
cd "$(dirname "$0")/../.."
figures=${1:-build/gpu.json}
mkdir -p "$(dirname "$figures")"
rm -f "$figures"
FTAR_GPU_FIGURES=$(realpath -m "$figures") timeout 480 "${PYTHON:-.venv/bin/python}" -m pytest -rs -m gpu tests/gpu
if [ -e "$figures" ]; then cat "$figures"; echo; fi
