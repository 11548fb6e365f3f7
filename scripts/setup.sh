# shellcheck shell=sh
# Set-up on first use, shared by scripts/dsprobe and scripts/test.  Sourced; needs $root (the
# checkout).  Everything lands in $root/.venv, which is complete exactly when its stamp is there:
# an interrupted set-up leaves none, and the next one starts over.

venv=$root/.venv
# The system's own Python whatever PATH says (pyenv, conda): bcc is installed for that one.
python=/usr/bin/python3
log=

say() { echo "dsprobe: $*" >&2; }

# die CODE SENTENCE
die() {
    code=$1
    shift
    say "$*"
    exit "$code"
}

# What the environment was made from; it is stale when any of it differs.
fingerprint() {
    echo "$(readlink -f "$python") $root $(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | cksum)"
}

# ready [dev]: true when the environment is complete and up to date (with the dev extra).
ready() {
    [ -r "$venv/.stamp$1" ] && [ -x "$venv/bin/dsprobe" ] &&
        [ "$(cat "$venv/.stamp$1")" = "$(fingerprint)" ]
}

# The distribution's packages for bcc, where they put it (Debian and Ubuntu; Fedora and RHEL).
has_bcc() {
    for dir in /usr/lib/python3/dist-packages/bcc /usr/lib/python3.*/site-packages/bcc; do
        [ -d "$dir" ] && return 0
    done
    return 1
}

# ensurepip comes apart from Python on Debian, and names the version that it belongs to.
has_venv() {
    [ -x "$python" ] || return 1
    for dir in /usr/lib*/"$(basename "$(readlink -f "$python")")"/ensurepip; do
        [ -d "$dir" ] && return 0
    done
    return 1
}

# run WHAT COMMAND...: quiet; where it fails, one sentence with the place of its output.
run() {
    what=$1
    shift
    [ -n "$log" ] || log=$(mktemp "${TMPDIR:-/tmp}/dsprobe-setup.XXXXXX") ||
        die 1 "cannot write a log in ${TMPDIR:-/tmp}: free some space or set TMPDIR"
    echo "+ $*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null || die 1 "$what failed: see $log"
}

# install DEBIAN-PACKAGES... : by apt-get, or the same by dnf.  Root only.
install() {
    if command -v apt-get >/dev/null; then
        say "installing $* (apt-get)"
        # A stale list of some other source is no reason to stop: the installation decides.
        run "apt-get update" sh -c 'apt-get -q update || true'
        run "apt-get install" env DEBIAN_FRONTEND=noninteractive apt-get -qy \
            -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@"
    elif command -v dnf >/dev/null; then
        names=$(for name; do
            case $name in
            python3-venv) ;; # in python3
            python3-bpfcc) echo python3-bcc ;;
            iproute2) echo iproute ;;
            libc6-dev) echo glibc-devel ;;
            libcap2-bin) echo libcap ;;
            procps) echo procps-ng ;;
            *) echo "$name" ;;
            esac
        done)
        say "installing $(echo "$names" | tr '\n' ' ')(dnf)"
        # shellcheck disable=SC2086 # one word per package
        run "dnf install" dnf -qy install $names
    else
        die 1 "neither apt-get nor dnf is here: install $* by hand"
    fi
}

setup_system() {
    has_bcc && has_venv && [ -e /etc/ssl/certs/ca-certificates.crt ] && return
    if [ "$(id -u)" = 0 ]; then
        install python3 python3-venv python3-bpfcc ca-certificates
    elif ! has_venv; then
        die 5 "python3-venv is missing: run sudo $root/scripts/dsprobe doctor once, which installs it"
    else
        say "python3-bpfcc is missing, which live data needs: sudo $root/scripts/dsprobe installs it"
    fi
    [ -x "$python" ] || die 1 "there is no $python: install python3"
}

# setup_venv [dev]
setup_venv() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die 1 "$python is $("$python" -V 2>&1): dsprobe needs Python 3.10 or newer there"
    [ -w "$root" ] || die 5 "cannot write in $root: run sudo $root/scripts/dsprobe doctor once"
    made=$(cat "$venv/.stamp" 2>/dev/null || true)
    rm -f "$venv/.stamp" "$venv/.stampdev"
    # Where only the requirements changed, bring the old environment up to date in place.
    case $made in
    "$(readlink -f "$python") $root "*) ;;
    *)
        say "making $venv with $(readlink -f "$python")"
        rm -rf "$venv" || die 5 "cannot remove $venv: run it with sudo once"
        run "making the virtual environment" "$python" -m venv --system-site-packages "$venv"
        ;;
    esac
    say "installing Python packages"
    pip=$venv/bin/python
    # Editable: a git pull needs no set-up unless the requirements change.  Without build isolation
    # setuptools is pinned like the rest.
    run "pip install" "$pip" -I -m pip install -q --no-input --disable-pip-version-check \
        -c "$root/scripts/constraints.txt" setuptools
    run "pip install" "$pip" -I -m pip install -q --no-input --disable-pip-version-check \
        -c "$root/scripts/constraints.txt" --no-build-isolation -e "$root${1:+[$1]}"
    # Under sudo in somebody's checkout: what was made stays theirs to remove.
    [ "$(id -u)" != 0 ] || run "chown" chown -R --reference="$root" "$venv"
    fingerprint >"$venv/.stamp"
    [ -z "$1" ] || cp "$venv/.stamp" "$venv/.stamp$1"
    [ -z "$log" ] || rm -f "$log"
}

# setup [dev]: both, once at a time; the lock ends with the subshell.
setup() {
    (
        flock -n 9 || {
            say "waiting for another set-up of $root"
            flock 9
        }
        [ -n "$1" ] || [ ! -e "$venv/.stampdev" ] || set -- dev # keep what is there
        setup_system
        ready "$1" || setup_venv "$1"
    ) 9<"$root/pyproject.toml"
}
