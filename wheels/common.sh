# Sourced by the scripts of this folder, which run from the repository's root.
set -euo pipefail
umask 022 # file modes are part of a wheel's bytes

# find_python 3.12: the path of such an interpreter, from PATH or pyenv.
find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "Python $1 not found on PATH or under pyenv" >&2
  return 1
}

say() { printf '\n== %s\n' "$*"; }
