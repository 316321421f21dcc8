# Sourced by the other scripts: step lines, finding Python, and the virtual environment in .venv.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
MINIMUM="3.12"

step() { printf '\n==> %s\n' "$*"; }
fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

is_recent_python() {
    "$1" -c "import sys; sys.exit(sys.version_info[:2] < tuple(map(int, '$MINIMUM'.split('.'))))" >/dev/null 2>&1
}

# Prints the path of a recent enough Python: $PYTHON, the PATH, pyenv's versions, uv's; nothing if there is none.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3.14 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python; do
        # A pyenv shim may be on the PATH for a version that is not selected: only running it tells.
        if candidate="$(command -v "$candidate" 2>/dev/null)" && is_recent_python "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    if command -v uv >/dev/null 2>&1; then
        uv python find ">=$MINIMUM" 2>/dev/null || true
    fi
}

make_venv() {
    local python
    python="$(find_python)"
    if [ -z "$python" ]; then
        fail "no Python >= $MINIMUM found (looked at \$PYTHON, the PATH, pyenv and uv). Install one, for example with
    apt-get install python3.12 python3.12-venv    pyenv install 3.12    uv python install 3.12    brew install python@3.12
and run this again."
    fi
    step "Making .venv with $("$python" --version)"
    rm -rf "$VENV"
    if ! "$python" -m venv "$VENV"; then
        rm -rf "$VENV"
        command -v uv >/dev/null 2>&1 || fail "$python cannot make virtual environments: install its venv package
(Debian and Ubuntu: apt-get install python3-venv)."
        uv venv --quiet --seed --python "$python" "$VENV"
    fi
}

# What an installation depends on: when it changes, the packages are installed again.
installation_stamp() {
    "$VENV/bin/python" - "$ROOT" "$1" <<'PYTHON'
import hashlib, pathlib, sys
root, extra = sys.argv[1:]
parts = (root, extra, sys.version)
print(hashlib.sha256(repr(parts).encode() + pathlib.Path(root, "pyproject.toml").read_bytes()).hexdigest())
PYTHON
}

# ensure_venv [EXTRA]: makes .venv and installs the package with the extra, unless that has been done before.
ensure_venv() {
    local extra="${1:-}" target="$ROOT" stamp_file="$VENV/.installed-${1:-base}" log="$VENV/install.log" stamp line
    [ -n "$extra" ] && target="$ROOT[$extra]"
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
    stamp="$(installation_stamp "$extra")"
    if [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ]; then
        step "Using .venv as it is"
        return
    fi
    step "Installing the package${extra:+ with the extra '$extra'} into .venv (a minute or two, about 1 GB)"
    # Not compiling every module ahead saves a third of the time: Python compiles those that are imported.
    if ! "$VENV/bin/python" -m pip install --no-compile --disable-pip-version-check --progress-bar off \
        --editable "$target" 2>&1 | tee "$log" | while IFS= read -r line; do
        case "$line" in
        *Downloading*" MB)"*) printf '    %s\n' "${line#"${line%%[! ]*}"}" ;;
        "Installing collected packages"*) printf '    Installing %d packages\n' "$(wc -w <<<"${line#*: }")" ;;
        esac
    done; then
        tail -n 30 "$log" >&2
        fail "installing failed; the whole output is in $log"
    fi
    echo "$stamp" >"$stamp_file"
}
