# shellcheck shell=bash
# Sourced by the scripts that need the environment: `setup_venv EXTRAS` makes .venv if it is missing and installs the pinned set.
#
# An environment that is there already is kept, with the torch that it has.  Set PYTHON to choose the interpreter of a new one.

setup_venv() {
    local extras=$1 wanted stamp stamps
    if [ ! -x .venv/bin/python ]; then
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "Python 3.11 or newer is needed; set PYTHON to one" >&2
            return 2
        }
        echo "making .venv"
        "${PYTHON:-python3}" -m venv .venv || return
    fi
    wanted=$(cat setup.py constraints.txt | sha256sum)
    stamps=(".venv/.installed-$extras")
    if [ "$extras" = cpu ]; then stamps+=(.venv/.installed-dev); fi # dev holds what cpu does
    for stamp in "${stamps[@]}"; do
        if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return 0; fi
    done
    echo "installing megahedge[$extras] and the versions in constraints.txt (some minutes on a fresh machine)"
    install_torch || return
    pip_install -c constraints.txt -e ".[$extras]" || return
    if [ "$extras" = dev ]; then
        install_references || echo "the reference code of mamba-ssm and causal-conv1d cannot be had: tests that need it are skipped" >&2
    fi
    echo "$wanted" >".venv/.installed-$extras"
}

# A machine with an NVIDIA GPU takes the default build; one without is spared the gigabytes of CUDA libraries where a CPU build can be had.
install_torch() {
    local torch
    if .venv/bin/python -c 'import torch' 2>/dev/null; then return 0; fi
    torch=torch==$(sed -n 's/^torch==//p' constraints.txt)
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        pip_install "$torch"
        return
    fi
    pip_install "$torch+cpu" 2>/dev/null && return
    # uv knows where PyTorch keeps its CPU builds
    pip_install uv && .venv/bin/uv pip install --python .venv/bin/python --torch-backend cpu "$torch" && return
    pip_install "$torch"
}

# What the tests compare our adapters with.  Built without CUDA these packages hold Python alone and cannot be imported as they are, so
# that they lie in a folder of their own, where nothing but the tests looks.  No dependencies: they would bring compilers of kernels.
install_references() {
    MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE \
        pip_install -c constraints.txt --no-build-isolation --no-deps --upgrade --target .venv/references causal-conv1d mamba-ssm
}

# pip's own bars on a terminal; elsewhere a line for each package that it fetches, and for the installation.  The status is pip's.
pip_install() {
    if [ -t 1 ]; then
        .venv/bin/python -m pip install "$@"
        return
    fi
    (
        set -o pipefail
        .venv/bin/python -m pip install --progress-bar off "$@" | while IFS= read -r line; do
            case $line in
                Collecting* | "  Downloading"* | Installing* | "Successfully installed"*) printf '%s\n' "$line" ;;
            esac
        done
    )
}
