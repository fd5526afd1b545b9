# Sourced by the scripts that need the environment: `setup_venv EXTRAS` makes .venv if it is missing and installs the pinned set.
#
# An environment that is there already is kept, with the torch that it has.  Set PYTHON to choose the interpreter of a new one.

setup_venv() {
    local extras=$1 wanted stamp
    if [ ! -x .venv/bin/python ]; then
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "Python 3.11 or newer is needed; set PYTHON to one" >&2
            return 2
        }
        echo "making .venv"
        "${PYTHON:-python3}" -m venv .venv || return
    fi
    wanted=$(cat setup.py constraints.txt | sha256sum)
    for stamp in ".venv/.megahedge-$extras" ".venv/.megahedge-dev"; do
        if [ "$stamp" = .venv/.megahedge-dev ] && [ "$extras" != cpu ]; then continue; fi # dev holds what cpu does
        if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return 0; fi
    done
    echo "installing megahedge[$extras] and the versions in constraints.txt (some minutes on a fresh machine)"
    install_torch || return
    .venv/bin/python -m pip install --quiet -c constraints.txt -e ".[$extras]" || return
    echo "$wanted" >"$stamp"
}

# A machine with an NVIDIA GPU takes the default build; one without is spared the gigabytes of CUDA libraries where a CPU build can be had.
install_torch() {
    local torch
    if .venv/bin/python -c 'import torch' 2>/dev/null; then return 0; fi
    torch=torch==$(sed -n 's/^torch==//p' constraints.txt)
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        .venv/bin/python -m pip install --quiet "$torch"
        return
    fi
    .venv/bin/python -m pip install --quiet "$torch+cpu" 2>/dev/null && return
    # uv knows where PyTorch keeps its CPU builds
    .venv/bin/python -m pip install --quiet uv &&
        .venv/bin/uv pip install --quiet --python .venv/bin/python --torch-backend cpu "$torch" && return
    .venv/bin/python -m pip install --quiet "$torch"
}
