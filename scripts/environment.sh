# Sourced by the scripts: makes (or finds again) the one environment, .venv, and activates it.
#   environment EXTRA    install pennyclip, editable, with this extra
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment() {
    local python="${PYTHON:-python3}" mark=".venv/.installed-$1"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "pennyclip needs Python 3.11 or later; '$python' is $("$python" --version)." >&2
        echo "Set PYTHON=/path/to/python3.11 and run this again." >&2
        exit 2
    fi
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    . .venv/bin/activate
    # Installed again only when what decides the installation has changed.
    local state
    state="$(cat pyproject.toml constraints.txt | sha256sum)"
    if [ ! -f "$mark" ] || [ "$(cat "$mark")" != "$state" ]; then
        echo "installing pennyclip[$1] into .venv (torch alone is several GB) ..." >&2
        # The pinned torch first: another package would otherwise pull in the newest.
        python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch torchvision
        python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$1]"
        echo "$state" > "$mark"
    fi
}
