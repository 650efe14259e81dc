#!/usr/bin/env bash
# Makes .venv from the lock of this Python. Safe to call again: it does only what changed, nothing in well under a second.
#
#   PYTHON=python3.12 requirements/install.sh
#
# uv is told what pip is told: PIP_FIND_LINKS, PIP_INDEX_URL and PIP_EXTRA_INDEX_URL count unless their uv equivalents are set.
# Without an NVIDIA GPU a CPU build of torch is installed: the one that the configured places offer, otherwise PyTorch's own.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # compiled once instead of at every start: seconds per process that imports torch

venv=.venv
say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  say "$@"
  exit 1
}

# ---- Python -------------------------------------------------------------------------------------------------------------------
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
python=""
for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
  case "$(version_of "$candidate")" in
    3.11 | 3.12) python=$candidate && break ;;
  esac
done
[ -n "$python" ] || die "no Python 3.11 or 3.12 (tried: ${PYTHON:-python3 python3.12 python3.11})." \
  "Install one, or name it: make PYTHON=/path/to/python3.12 ..."
version=$(version_of "$python")
lock=requirements/lock-py${version/./}.txt
for tool in g++ sha256sum; do
  command -v "$tool" >/dev/null || die "$tool is missing. DeepSpeed's extension is compiled here: install your system's g++ (Debian: apt-get install g++)."
done

# ---- What is already there? ---------------------------------------------------------------------------------------------------
digest() { cat "$@" | sha256sum | cut -c1-32; }
locked="$version $(digest "$lock" requirements/install.sh) $PWD"
project=$(digest pyproject.toml)
stamped() { [ -f "$venv/.$1" ] && [ "$(cat "$venv/.$1")" = "$2" ]; }
if stamped locked "$locked" && stamped ready "$project"; then
  exit 0
fi
SECONDS=0

# ---- Where packages come from -------------------------------------------------------------------------------------------------
if ! stamped locked "$locked"; then
  if ! [ -x "$venv/bin/python" ] || [ "$(version_of "$venv/bin/python")" != "$version" ] || ! [ -x "$venv/bin/uv" ]; then
    say "making $venv with Python $version"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q "$(grep '^uv==' "$lock")"
  fi
fi
export PATH="$PWD/$venv/bin:$PATH" VIRTUAL_ENV="$PWD/$venv"
: "${PIP_FIND_LINKS:=$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)}"
if [ -n "$PIP_FIND_LINKS" ] && [ -z "${UV_FIND_LINKS:-}" ]; then
  UV_FIND_LINKS=$(tr -s '[:space:]' ',' <<<"$PIP_FIND_LINKS")
  export UV_FIND_LINKS=${UV_FIND_LINKS%,}
fi
if [ -n "${PIP_INDEX_URL:-}" ] && [ -z "${UV_INDEX_URL:-}${UV_DEFAULT_INDEX:-}" ]; then
  export UV_DEFAULT_INDEX=$PIP_INDEX_URL
fi
if [ -n "${PIP_EXTRA_INDEX_URL:-}" ] && [ -z "${UV_EXTRA_INDEX_URL:-}${UV_INDEX:-}" ]; then
  export UV_INDEX=$PIP_EXTRA_INDEX_URL
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} # pip's rule: all indexes are equal
fi
install() { uv pip install -q --python "$venv/bin/python" --no-deps "$@"; }

# ---- The lock -----------------------------------------------------------------------------------------------------------------
has_gpu() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }
install_locked() {
  local pins=$venv/pins.txt torch torch_from=() first deepspeed
  torch=$(grep '^torch==' "$lock")
  cp "$lock" "$pins"
  if ! has_gpu; then
    if install --dry-run "$torch+cpu" 2>/dev/null; then
      sed -i "s/^$torch\$/$torch+cpu/" "$pins"
    else
      torch_from=(--torch-backend cpu)
    fi
  fi
  say "installing $(grep -c == "$pins") packages of $lock (torch: $(has_gpu && echo CUDA || echo CPU) build)"
  # What DeepSpeed's build imports comes first, so that its compilation and the other packages share the two cores.
  first='torch|numpy|setuptools|wheel|ninja|packaging|psutil|py-cpuinfo|hjson|msgpack|einops|tqdm|pydantic|pydantic-core'
  first+='|annotated-types|typing-inspection|typing-extensions|sympy|mpmath|filelock|jinja2|markupsafe|networkx|fsspec'
  deepspeed=$(grep '^deepspeed==' "$pins")
  grep -E "^($first)==" "$pins" >"$venv/pins-first.txt"
  install "${torch_from[@]}" -r "$venv/pins-first.txt"
  if has_gpu; then # torch's own CUDA libraries, at the versions that its metadata names
    uv pip install -q --python "$venv/bin/python" -c "$pins" "$torch"
  fi
  build_deepspeed "$deepspeed" >"$venv/deepspeed-build.log" 2>&1 &
  local build=$!
  grep -v -E "^($first|deepspeed)==" "$pins" >"$venv/pins-rest.txt"
  install -r "$venv/pins-rest.txt" || {
    wait "$build" || true
    die "packages could not be installed (see above)"
  }
  wait "$build" || {
    tail -n 40 "$venv/deepspeed-build.log" >&2
    die "DeepSpeed's extension did not compile: the whole log is $venv/deepspeed-build.log"
  }
}

# DeepSpeed compiles its shared-memory collective at the first init_distributed, for a minute and into a folder that all
# environments share. Here it is compiled once, into the package. --no-cache: a wheel cached without it must not be taken.
build_deepspeed() {
  local built
  built=$(python -c 'import importlib.util as u, pathlib, torch
s = u.find_spec("deepspeed")
p = pathlib.Path(s.origin).parent / "ops/comm" if s else pathlib.Path("/nonexistent")
print(torch.__version__ if list(p.glob("deepspeed_shm_comm_op*.so")) else "")')
  if [ -n "$built" ] && stamped deepspeed "$1 torch==$built $version"; then
    return
  fi
  say "compiling DeepSpeed's shared-memory extension (the slowest step)"
  # Both sources at once, without debug data and torch's C++ frontend, which they do not use: half the time in g++.
  DS_ACCELERATOR=cpu DS_BUILD_OPS=0 DS_BUILD_SHM_COMM=1 DS_ENABLE_NINJA=1 MAX_JOBS=2 \
    CFLAGS="-g0 -DTORCH_INDUCTOR_CPP_WRAPPER --param ggc-min-heapsize=4000000 --param ggc-min-expand=400" \
    uv pip install --python "$venv/bin/python" --no-deps --no-cache --no-build-isolation --reinstall-package deepspeed "$1"
  echo "$1 torch==$(python -c 'import torch; print(torch.__version__)') $version" >"$venv/.deepspeed"
}

if ! stamped locked "$locked"; then
  rm -f "$venv/.ready" "$venv/.locked"
  install_locked
  echo "$locked" >"$venv/.locked"
fi

# ---- The project itself, editable, and the link tree through which the type checker sees its import names ----------------------
install --no-build-isolation --reinstall-package rollforward -e .
mkdir -p "build/names/rollforward"
for folder in conf distill kernels model rl rollout sandbox; do
  ln -sfn "../../../$folder" "build/names/rollforward/$folder"
done
# What the command line imports before it can answer; the rest is compiled when it is first imported.
python -m compileall -q "$venv"/lib/python*/site-packages/{antlr4,hydra,msgspec,omegaconf,yaml} >/dev/null || true
echo "$project" >"$venv/.ready"
say "ready after $SECONDS s"
