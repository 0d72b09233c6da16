"""Shell scripts written at random out of the constructs that the reader of scripts follows."""

from __future__ import annotations

import random
from collections.abc import Callable

SCALARS = ("A", "B", "C", "D")
NUMBERS = ("I", "J")
LISTS = ("L", "M")
NAMES = (*SCALARS, *NUMBERS, *LISTS, "K", "R", "V", "U")  # K: with keys; R: read-only; V: a name; U: never set

_PLAIN = "a,,b a b1 x.y p/q.sh 7 12 1e-6 --k=v a,b x:y a=b @ +x a-b_c 007 abc A.b.C /m/Q-7B/ - =".split()
_QUOTED = ["two words", "", "a  b", " c", "d ", "x*", "[ab]c", "?", "it;s", "a|b", "#no", "<x>", "a,b,c", "--n 5", "%d"]
_PATTERNS = ["*", "?", "a*", "*/", "*.", "[a-c]", "[!a]*", '"*"', "\\*", "$B", '"$B"', "*b*", "-", "[[:digit:]]", "x"]
_LEAVES = ["break", "continue", "break 2", "continue 2", "[ $# -gt 2 ] && continue", "(( I > 1 )) && break"]
_LEAVES += ["[ $A = 2 ] && break 2", "[ $A = 2 ] && continue", "[ -e /nowhere ] && break 2"]
_SIGNS = ["-eq", "-ne", "-lt", "-le", "-gt", "-ge"]


class Writer:
    """Writes one script."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sites = 0
        self._functions: list[str] = []
        self._writers: tuple[str, ...] = ("g", "h")  # functions that only write, of which h may use g
        self._named = 0  # functions
        self._in_function = self._apart = False
        self._loops = 0
        self._depth = 0

    def script(self) -> str:
        """Return the text of the script, which ends with a run that shows all variables."""
        lines = ["V=B", *self._number_writer(), *self._writer(), *self._writer()]
        for _ in range(self._random.randint(3, 9)):
            lines += self._statement()
        shown = ['"$A"', "$B", '"${C-}"', "$D", "${I:-0}", '"$J"', '"${L[@]}"', "x${M[*]}", '"$*"', "$#"]
        self._random.shuffle(shown)
        return "\n".join([*lines, self._run(*shown), ""])

    # -- words

    def _one(self, *ways: str | Callable[[], str]) -> str:
        way = self._random.choice(ways)
        return way if isinstance(way, str) else way()

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _word(self) -> str:
        parts = [self._part() for _ in range(self._random.choice((1, 1, 1, 2, 3)))]
        return "".join(parts)

    def _part(self) -> str:
        return self._one(
            *[self._plain] * 4, *[self._in_quotes] * 3, *[lambda: self._expansion(False)] * 3,
            lambda: f"'{self._random.choice(_QUOTED)}'", lambda: "\\ z", lambda: "$'t\\tx'",
        )  # fmt: skip

    def _plain(self) -> str:
        return self._random.choice(_PLAIN)

    def _in_quotes(self) -> str:
        parts = [self._one(self._plain, lambda: self._random.choice(_QUOTED), *[lambda: self._expansion(True)] * 4,
        "\\\"", "'q'")
                 for _ in range(self._random.choice((1, 1, 1, 2)))]  # fmt: skip
        return '"' + "".join(parts) + '"'

    def _scalar(self) -> str:
        return self._random.choice(SCALARS)

    def _number(self) -> str:
        return self._random.choice(NUMBERS)

    def _list(self) -> str:
        return self._random.choice(LISTS)

    def _expansion(self, quoted: bool) -> str:
        name = self._random.choice((*SCALARS, *SCALARS, *NUMBERS, "U", "R"))
        array = self._list()
        self._depth += 1
        try:
            return self._one(
                *[f"${{{name}}}"] * 4, f"${{{name}}}", lambda: self._default(name, quoted),
                lambda: self._default(name, quoted),
                lambda: self._changed(name), lambda: self._changed(name), f"${{#{name}}}",
                lambda: f"$(({self._sum()}))",
                lambda: self._arguments(quoted), lambda: self._arguments(quoted), lambda: self._elements(array),
                lambda: self._elements(array), lambda: self._command(), *[self._output] * 2,
                f"${{K[{self._random.choice('ab')}]}}",
            )  # fmt: skip
        finally:
            self._depth -= 1

    def _default(self, name: str, quoted: bool) -> str:
        name = self._one(name, name, "U", "1", f"{self._list()}[0]")
        signs = [":-", "-", ":+", "+"] + (
            [":=", "="] if name.isidentifier() and name not in ("U", "R", *NUMBERS) else []
        )
        inner = self._one(
            "",
            self._plain,
            lambda: f"${{{self._scalar()}}}",
            lambda: self._in_quotes() if self._depth < 3 else "z",
            "'s q'",
            "x y",
        )
        if quoted and inner.startswith("'"):
            inner = "w"
        return f"${{{name}{self._random.choice(signs)}{inner}}}"

    def _changed(self, name: str) -> str:
        pattern = self._random.choice(_PATTERNS)
        return self._one(
            f"${{{name}#{pattern}}}", f"${{{name}##{pattern}}}", f"${{{name}%{pattern}}}", f"${{{name}%%{pattern}}}",
            f"${{{name}/{pattern}/z}}", f"${{{name}//b/{self._plain()}}}", f"${{{name}/#a/Z}}", f"${{{name}/%b}}",
            f"${{{name}^^}}",
            f"${{{name},,}}", f"${{{name}^}}", f"${{{name}:1}}", f"${{{name}:0:2}}", f"${{{name}: -2}}",
            f"${{{name}:0:1}}", "${!V}",
        )  # fmt: skip

    def _arguments(self, quoted: bool) -> str:
        return self._one("$1", "$2", "$#", "${1-n}", "$@", "$*", "${@:2}", "${*:1:1}", "${@:-d}", "${@+x}", "${10}")

    def _elements(self, array: str) -> str:
        return self._one(
            f"${{{array}[0]}}", f"${{{array}[1]}}", f"${{{array}[I]}}", f"${{{array}[$J]}}", f"${{{array}[@]}}",
            f"${{{array}[*]}}",
            f"${{#{array}[@]}}", f"${{!{array}[@]}}", f"${{{array}[@]:1}}", f"${{{array}[-1]}}",
            f"${{{array}[@]/a/z}}", f"${array}",
            f"${{{array}[@]#a}}", f"${{#{array}[0]}}", f"${{{array}[$((I+1))]}}", f"${{{array}[@]+{array}}}",
            "${K[@]}", "${#K[@]}",
            f"${{{array}[@]:0:1}}", f"${{{array}[@]^^}}",
        )  # fmt: skip

    def _command(self) -> str:
        if self._depth > 2:
            return "$(echo)"
        return self._one(
            lambda: f"$(echo {self._word()})", lambda: f"$(echo {self._word()} {self._plain()})",
            "$(basename /m/Q.sh .sh)",
            lambda: f"`echo {self._plain()}`", lambda: f"$(basename {self._plain()})",
            lambda: f"$(dirname {self._plain()})",
            lambda: f"$(printf '%s\\n' {self._word()} {self._plain()})", "$(echo -n a -n)", "$(cd a || pwd)",
            "$(echo a <<< b)", "$(echo x2>/dev/null)",
            "$(outside o)", "$(outside 'o p')", "$(printf %s q)", lambda: f"$(echo \"${{{self._scalar()}}}\" | tr a b)",
        )  # fmt: skip

    def _output(self) -> str:
        if not self._writers:
            return "$(n)"
        name, count = self._random.choice(self._writers), self._random.choice((0, 1, 1, 2))
        words = [self._word() if self._depth < 4 else self._plain() for _ in range(count)]
        after = self._one(*[""] * 6, " 2>/dev/null", " | cat", ">/dev/null", " &")
        return f"$({' '.join((name, *words))}{after})"

    def _writer(self) -> list[str]:
        """Return a function that only writes; it is defined again at times, and perhaps behind a condition."""
        name = self._random.choice(("g", "h"))
        known, self._writers = self._writers, ("g",) if name == "h" and "g" in self._writers else ()
        words = " ".join(self._one(self._word, "$1", '"$1"', '"$@"', "$*", "$#", "${2:-z}") for _ in range(2))
        command = self._one(
            *[f"echo {words}"] * 4, f"printf '%s' {words}", f"printf '%s\\n' {words}", f"printf '<%s> %s%%' {words}",
            f"echo -n {words}", f"echo {words} | cat", f"A=in; echo {words}", f"echo {words}; echo b", "basename $1",
            f"echo {words} >/dev/null", f"echo {words} 2>/dev/null", f"[ -e /nowhere ] && echo {words}",
            *[f"local A=in; echo {words}"] * 2, f"local A=$1 B=$A; echo {words}", f"local V={words}; echo {words}",
            f"local A=in B; echo {words}", f"local N={self._word()}\n local A=$N; echo {words}",
            f"printf '%5s' {words}",
        )  # fmt: skip
        self._writers = known
        begin, end = self._one("{ }", "{ }", "{ }", "( )").split()
        after = self._one(*[""] * 7, " >/dev/null", " 2>/dev/null")
        head = self._one(*["", ""] * 3, "[ -e /nowhere ] || ", "outside_ok && ")
        return [f"{head}{name}() {begin} {command}; {end}{after}", self._one(f"unset -f {name}", *[":"] * 7)]

    def _number_writer(self) -> list[str]:
        """Return a function that writes a number."""
        return [f"n() {{ {self._one('echo $((I * 2 + 1))', 'echo $(( ${1:-3} + J ))', 'echo 8', 'expr 3 + 4')}; }}"]

    def _sum(self) -> str:
        number = self._one("$(n)", "$(n 4)", "I", "J", "I", "J", "3", "$((I))", "${J:-0}", "0x1f", "010")
        other = self._one("I", "J", "2", "5", "(I+1)", "${#L[@]}", "-I", "!J", "I==J", "I<3")
        return self._one(
            f"{number} + {other}", f"{number}*{other}", f"{number} / 2", f"{number} % 3", f"{number} > {other} ? I : 4",
            f"I = {other}", "I++", "--J", f"J += {other}", f"{number} && {other}", f"{number} || J++", f"{number} << 2",
            f"{number} ** 2", f"I++, {other}", "~I & 7", f"{number} - {other}",
        )  # fmt: skip

    # -- statements

    def _statement(self) -> list[str]:
        self._depth += 1
        try:
            return self._random.choice(self._ways())()
        finally:
            self._depth -= 1

    def _ways(self) -> list[Callable[[], list[str]]]:
        simple: list[Callable[[], list[str]]] = [
            *[self._assignment] * 6, *[self._array] * 3, *[self._arithmetic] * 2, *[self._positional] * 2,
            self._declared,
            self._unset, self._separators, self._read, self._outside, self._evaluated, self._option, self._call,
            self._call,
            lambda: [self._run()], lambda: [self._run()], lambda: [self._short()], lambda: [self._short()],
        ]  # fmt: skip
        simple += [self._writer, self._writer, self._number_writer]
        if self._loops:
            simple += [lambda: [self._one(*_LEAVES)]] * 4
        if self._in_function:
            simple += [lambda: [self._one("return", "return 1", "[ $# -gt 1 ] && return", "shift", "return 0")]]
        if self._depth > 3:
            return simple
        return simple + [
            self._if, self._if, self._case, self._for, self._counted, self._while, self._function, self._function,
            self._group,
            self._options_loop,
        ]  # fmt: skip

    def _block(self) -> list[str]:
        lines = []
        for _ in range(self._random.choice((1, 1, 2, 3))):
            lines += self._statement()
        return ["  " + line if "EOF" not in line else line for line in lines]

    def _run(self, *shown: str) -> str:
        self._sites += 1
        words = list(shown) or [self._word() for _ in range(self._random.randint(1, 4))]
        line = f"megatron {self._sites} " + " ".join(words)
        before = self._one(*[""] * 9, "A=p ", "B=$A ", "C=r D=s ", "env ", "command ", "time ")
        after = self._one(*[""] * 9, " 2>&1", " >/dev/null", " # c", " <<< x", " \\\n  last")
        return before + line + after

    def _assignment(self) -> list[str]:
        name = self._scalar()
        return [self._one(*[lambda: f"{name}={self._word()}"] * 4, lambda: f"{name}+={self._word()}", f"{name}=",
        f"{name}+=' y'",
                          lambda: f"export {name}={self._word()}", lambda: f"A={self._word()} B={self._word()}",
                          lambda: f"printf -v {name} %s {self._in_quotes()}", "V=A", f"export {name}",
                          f"V={name}")]  # fmt: skip

    def _array(self) -> list[str]:
        name = self._list()
        words = " ".join(self._word() for _ in range(self._random.randint(0, 3)))
        return [self._one(*[f"{name}=({words})"] * 3, f"{name}+=({words})", f"{name}+=({words})",
        lambda: f"{name}[1]={self._word()}",
                          lambda: f"{name}[$I]={self._word()}", lambda: f"{name}[0]+={self._plain()}",
                          lambda: f"{name}[I+1]={self._plain()}",
                          lambda: f"{name}={self._word()}", lambda: f"{name}+={self._plain()}", f"unset '{name}[0]'",
                          f"{name}=(z)\n{name}[-1]=e",
                          lambda: f"declare -A K=([a]={self._word()} [b]=z)",
                          lambda: f"declare -A K\nK[a]={self._word()}",
                          f"{name}=([2]=q r)")]  # fmt: skip

    def _arithmetic(self) -> list[str]:
        name = self._number()
        return [self._one(lambda: f"(({self._sum()}))", lambda: f"{name}=$(({self._sum()}))",
        lambda: f'let "{self._sum()}"',
                          *[f"{name}={self._random.randint(0, 4)}"] * 3, f"(( {name}++ ))", f"declare -i {name}=1+2",
                          f"{name}+=1",
                          lambda: f"((L[0] = {self._sum()}))")]  # fmt: skip

    def _positional(self) -> list[str]:
        words = " ".join(self._word() for _ in range(self._random.randint(0, 3)))
        return [
            self._one(
                f"set -- {words}",
                f"set -- {words}",
                f"set x {words}",
                "set -- p q r s\nshift 2",
                'set -- "$@" n',
                "shift",
                "shift 2",
                "set -- $A",
            )
        ]

    def _declared(self) -> list[str]:
        name = self._random.choice(("A", "B", "D", "A", "B", "D", *LISTS))
        kind = (
            "local"
            if self._in_function and self._chance(0.7)
            else self._one("declare", "export", "typeset", "declare -x", "declare -g")
        )
        value = self._one(f"={self._word()}", f"={self._word()}", "")
        if self._chance(0.1):
            return (
                [self._one("readonly R=5", "export R=6 2>/dev/null", f"readonly R={self._word()}")]
                if not self._apart
                else []
            )
        return [f"{kind} {name}{value if name in SCALARS else '=(' + value[1:] + ')'}"]

    def _unset(self) -> list[str]:
        return [self._one(f"unset {self._scalar()}", f"unset {self._list()}", f"unset -v {self._scalar()}",
        "unset A B", "unset K",
                          "unset -f f1")]  # fmt: skip

    def _separators(self) -> list[str]:
        return [self._one("IFS=,", "IFS=:", "unset IFS", "unset IFS", "IFS=$' \\t\\n'", "IFS=", "IFS=', '")]

    def _read(self) -> list[str]:
        return [self._one("read -r A B <<< 'x y z'", "IFS=, read -r A B <<< 'p,q r'", "mapfile -t L <<< z",
        "read C < /dev/null",
                          "cat <<EOF\n$A 'x\nEOF", "cat > /dev/null <<'EOF'\nA=5\nEOF")]  # fmt: skip

    def _outside(self) -> list[str]:
        name = self._scalar()
        return [
            self._one(
                f"{name}=$(outside {self._plain()})",
                "I=$(outside 3)",
                f"outside {self._word()}",
                "cd . && J=2",
                "true",
                ":",
            )
        ]

    def _evaluated(self) -> list[str]:
        return [
            self._one(
                f"eval '{self._scalar()}={self._plain()}'",
                f'eval "{self._scalar()}=\\${self._scalar()}"',
                "eval $B 2>/dev/null" if self._chance(0.1) else "eval :",
                f"bash -c 'megatron {self._site()} \"$0\" $1 ${{A-n}}' z {self._word()}",
            )
        ]

    def _site(self) -> int:
        self._sites += 1
        return self._sites

    def _option(self) -> list[str]:
        return [self._one("set -a", "set +a", "shopt -s nocasematch", "shopt -u nocasematch", "shopt -s extglob",
        "set -f", "set +f",
                          "shopt -s lastpipe", "set -o pipefail", "trap 'A=end' EXIT")]  # fmt: skip

    def _call(self) -> list[str]:
        if not self._functions:
            return self._assignment()
        words = " ".join(self._word() for _ in range(self._random.randint(0, 3)))
        before = self._one(*[""] * 6, "A=w ")
        after = self._one(*[""] * 9, " | cat", " &\nwait", " || B=no", " && C=yes", " >/dev/null")
        return [f"{before}{self._random.choice(self._functions)} {words}{after}"]

    def _short(self) -> str:
        condition, sign = self._condition(), self._one("&&", "||")
        ways = [lambda: self._assignment()[0], lambda: self._arithmetic()[0], self._guarded]
        return f"{condition} {sign} {self._one(*ways[: 2 if 'outside' in condition else 3])}"

    def _guarded(self) -> str:
        return f"{{ {self._run()}\n}}"

    def _condition(self) -> str:
        name = self._random.choice((*SCALARS, "U", "R"))
        number = self._one("$I", "$J", "3", "${#A}", "$#")
        return self._one(
            f'[ -z "${name}" ]', f"[ -n \"${{{name}}}\" ]", f"[[ -n ${name} ]]", f"[[ -z ${{{name}:-}} ]]",
            f"[[ -v {name} ]]",
            lambda: f'[ "${name}" = {self._plain()} ]', lambda: f"[[ ${name} == {self._random.choice(_PATTERNS)} ]]",
            lambda: f"[[ ${name} != {self._word()} ]]", lambda: f"[[ {self._word()} = \"${name}\" ]]",
            f"[ {number} {self._random.choice(_SIGNS)} 2 ]", f"[[ {number} {self._random.choice(_SIGNS)} $J ]]",
            lambda: f"(( {self._sum()} ))", "true", "false", "! true", "outside_ok", "outside_fail",
            f"test -n \"${name}\"",
            lambda: f"! {self._condition()}" if self._depth < 3 else "true", f'[ "${name}" ]',
            f'[ -n "$A" -a {number} -gt 0 ]',
            f"[[ -n $A && {number} -lt 3 ]]", "[[ $B == a* || ! $C == b ]]", "[ -e /nowhere ]", "[ $# -gt 0 ]",
            '[ "$A" == x ] || [ $# -eq 0 ]', "[[ $A =~ ^a ]]", "[[ ( -n $A || -n $B ) && $# -lt 2 ]]", "[ -n $A ]",
            "[ ! -z \"$C\" ]",
        )  # fmt: skip

    def _if(self) -> list[str]:
        lines = [f"if {self._condition()}; then", *self._block()]
        if self._chance(0.3):
            lines += [f"elif {self._condition()}; then", *self._block()]
        if self._chance(0.6):
            lines += ["else", *self._block()]
        return [*lines, "fi"]

    def _case(self) -> list[str]:
        subject = self._one(lambda: f"${self._scalar()}", self._word, self._in_quotes, "$1", "$#")
        lines = [f"case {subject} in"]
        for _ in range(self._random.randint(1, 3)):
            pattern = "|".join(self._one(*_PATTERNS, self._plain) for _ in range(self._random.choice((1, 1, 2))))
            lines += [f"{pattern})", *self._block(), self._one(";;", ";;", ";;", ";&", ";;&")]
        return [*lines, *self._one("*) B=other ;;\n", "").splitlines(), "esac"]

    def _body(self) -> list[str]:
        self._loops += 1
        lines = self._block()
        self._loops -= 1
        return lines

    def _for(self) -> list[str]:
        words = " ".join(self._word() for _ in range(self._random.randint(1, 3)))
        if self._chance(0.3):
            return [
                "for A in 1 2 3; do",
                f"for {self._one('B', 'C')} in x y; do",
                *self._body(),
                "done",
                *self._body(),
                "done",
            ]
        header = self._one(
            *[f"for {self._scalar()} in {words}; do"] * 3, f"for {self._scalar()}; do", "for A in 1 2 3; do"
        )
        return [header, *self._body(), self._one("done", "done", "done >/dev/null", "done | cat")]

    def _counted(self) -> list[str]:
        return [
            f"for ((Q{self._depth} = 0; Q{self._depth} < {self._random.randint(0, 3)}; Q{self._depth}++)); do",
            *self._body(),
            "done",
        ]

    def _while(self) -> list[str]:
        name = f"Q{self._depth}"
        inner = self._body()
        head = self._one(
            f"while (({name}++ < 2)); do", f"until [ $(({name} += 1)) -gt 3 ]; do", f"while [ $(({name}++)) -lt 2 ]; do"
        )
        return [f"{name}=0", head, *inner, "done"]

    def _options_loop(self) -> list[str]:
        return [
            "while [ $# -gt 0 ]; do",
            f"  case $1 in --k=*) A=${{1#*=}};; {self._plain()}) B=$2;; *) C=$1;; esac",
            "  shift",
            "done",
        ]

    def _function(self) -> list[str]:
        self._named += 1
        name = f"f{self._named}"
        known, was, loops = self._functions, self._in_function, self._loops
        self._in_function, self._loops = True, 0
        lines = self._block() + self._block()
        self._in_function, self._loops = was, loops
        self._functions = [*known, name]
        head = self._one(f"{name}() {{", f"function {name} {{", f"{name}() {{")
        return [head, *lines, self._one("}", "}", "} 2>/dev/null"), *self._call()]

    def _group(self) -> list[str]:
        begin, end = self._one("{ }", "( )", "( )").split()
        was = self._apart, self._loops
        self._apart = True
        if begin == "(":
            self._loops = 0
        lines = self._block()
        self._apart, self._loops = was
        return [begin, *lines, end + self._one("", "", " | cat", " >/dev/null", " &\nwait")]
