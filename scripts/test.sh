#!/usr/bin/env bash
# Run the tests: `bash scripts/test.sh` the fast ones, `--all` the slow ones too; other arguments go to pytest.
# Makes .venv and installs what it needs.  Tests on real text look for it under $MEGAHEDGE_TEST_DATA and are skipped where that is unset.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh

case ${1:-} in
    -h | --help) sed -n '2,3s/^# \{0,1\}//p' scripts/test.sh; exit 0 ;;
esac
tier=()
if [ "${1:-}" = --all ]; then
    tier=(-m "slow or not slow")
    shift
fi
setup_venv dev
# two workers of one thread each: several ranks on few cores are slow with more
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
exec .venv/bin/python -m pytest -n 2 "${tier[@]}" "$@"
