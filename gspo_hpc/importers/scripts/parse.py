"""Parse shell scripts with tree-sitter-bash."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gspo_hpc.importers.scripts.expansion.disguised import BRACKET, CLOSING, DOLLAR, LESS, MORE, disguised, shown

if TYPE_CHECKING:
    from tree_sitter import Node, Parser, Tree

_LARGEST = 1 << 20  # characters of a script
_MOST_REPAIRS = 20  # times that a script is parsed again
# Beside letters and brackets the grammar reads $, or $2x as a name.
_ARGUMENTS = r"""\$[@*](?=[\w-])|\$#(?=\})|\$\d(?=\w)|(?<=[^\s=])\$\d"""
_TOKEN = re.compile(
    r"""\\.|['"#\n`]|\$?\(\(?|\)\)?|<<<|<<-?[ \t]*(?P<end>\\?[A-Za-z_]\w*|'[^'\n]+'|"[^"\n]+")|\$[A-Za-z_]\w*|"""
    r"<\w[\w-]*>(?=[ \t]*(?:[\n;)]|\Z))|(?<!\S)(?:(?:\[\[|=)(?!\S)|\]\]|(?:/|--?|[+~])(?=\s+(?:\]|-[ao]\s|&&|\|\|)))|"
    + _ARGUMENTS,
    re.DOTALL,
)
_SIGN = re.compile(r"/|--?|[+~]")
_IN_BRACKETS = re.compile(r"(?:^|[\s;&|!(])\[(?=\s)(?:(?!\s\]).)*\s$")
# A command whose here-document becomes a file, is code that may write one, or is read into a variable.
_WRITES = re.compile(
    r"^\s*(?:cat\b.*(?:>|\|\s*tee\b)|tee\b|(?:\w+=\S*\s+)*python3?\s[^|;&]*<<|(?:IFS=\S*\s+)?read\s[^|;&]*<<)|"
    r"(?:^|[\s/(])(?:bash|sh|dash|sbatch)\s[^|;&]*<<|^\s*cat\b[^;&]*\|(?:[^;&|]*[\s/])?(?:bash|sh|dash|sbatch)\b"
)
# Before a command that is not the first of its line, and behind one that is not the last.
_BEFORE = re.compile(r"(?:;|&&|\|\||&(?=\s)|(?<!\S)(?:\{|then|do|else)(?=\s))")
_BEHIND = re.compile(r";|&&|\|\|")
_GOES_ON = re.compile(r"[ \t]+(?:then|do)\b")  # behind ]], where bash needs no ; and the grammar does
_TIMED = re.compile(r"(?m)((?:^|[;&|({]|\b(?:then|do|else))[ \t]*)time(?:[ \t]+-p)?(?=[ \t]+\{\s)")
_ARGUED = re.compile(r"(?m)^([ \t]*for[ \t]+[A-Za-z_]\w*)[ \t]+do[ \t]*$")
_RESERVED = ("do", "done", "then", "elif", "else", "fi", "esac", "}")  # no command: the grammar has lost its way there
_DEFAULT = re.compile(r"(\$\{\w+:?[-=+])\$\(\(((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*)\)\)\}")

# A command that a substitution has alone, which writes or submits its here-document: $(cat <<END
_SUBSTITUTED = re.compile(r"\$\(\s*(?:cat(?:[ \t]+-)?|(?:[\w./]+/)?sbatch(?:[ \t][^|;&()\n]*)?)[ \t]*$")
# A here-document as parse() leaves it in the script, a word: whether $NAME in it is replaced, and its text.
_MARK = re.compile(r"heredoc_([01])_([0-9a-f]*)")
_ACTIVE = (
    "string",
    "raw_string",
    "ansi_c_string",
    "simple_expansion",
    "expansion",
    "arithmetic_expansion",
    "command_substitution",
    "process_substitution",
)
GROUP = "\x1a"  # the first command of a ( ) that stands for { }


class Document(NamedTuple):
    """A here-document as it stands in the script."""

    text: str
    replaced: bool  # $NAME and the like in it are replaced


_BEFORE_NAME, _BEHIND_NAME = re.compile(r"[^\s;&|<>()]*\Z"), re.compile(r"[^\s;&|<>()]*")  # of one word
_SETS = re.compile(r"(?<![^\s;&|(])[A-Za-z_]\w*=[^\s;&|<>()'\"]*\Z")  # the word before a place, in an assignment
_FAR = 4096  # characters of a word
_LINE = "\n"
PLACEHOLDER = "is a placeholder, at which bash reads no further: put its value there"


def taken_out(words: Sequence[str]) -> tuple[list[str], Document | None]:
    """Return the words of a command without its here-document, and that, None if there is none."""
    found: Document | None = None
    for word in words:
        if match := _MARK.fullmatch(word):
            found = Document(shown(bytes.fromhex(match[2])), match[1] == "1")
    return [word for word in words if not _MARK.fullmatch(word)], found


def parse(text: str) -> Tree:
    """Return the syntax tree of a script; a here-document is taken out, or one word if it is written to a file.

    Raises ValueError, with the line, for text that bash cannot parse, and for a script of absurd size.
    """
    import tree_sitter_bash  # only here: every other command of gspo-hpc starts without the parser
    from tree_sitter import Language, Parser

    if len(text) > _LARGEST:
        raise ValueError(
            f"the script has {len(text)} characters; at most {_LARGEST} are read: leave only the run in it"
        )
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"line {line}: a NUL byte stands here, so this is no shell script")
    prepared = _prepared(text)
    parser = Parser(Language(tree_sitter_bash.language()))
    tree, source = _repaired(parser, prepared)
    if tree.root_node.has_error:
        other, _ = _repaired(parser, disguised(prepared))
        if other.root_node.has_error:
            raise ValueError(_mistake(tree.root_node, source.decode("utf-8", "surrogatepass")))
        tree = other
    for node in nodes(tree.root_node):
        if node.type == "command_name" and (word := source_of(node)) in _RESERVED:
            raise ValueError(f"line {line_of(node)}: {word} stands as a command: write its statement more simply")
    return tree


def _repaired(parser: Parser, text: str) -> tuple[Tree, bytes]:
    """Return the tree of a script whose repairs are made, and what was parsed."""
    source = text.encode("utf-8", "surrogatepass")
    tree = parser.parse(source)
    for _ in range(_MOST_REPAIRS):
        repairs = sorted(_repairs(tree.root_node), reverse=True)
        repairs = [found for found in repairs if found[2] == b";"] or repairs  # what they cut off is read anew
        if not repairs:
            break
        repaired = bytearray(source)
        for begin, end, sign in repairs:
            repaired[begin:end] = sign + source[begin:end] + sign if end > begin else sign
        source = bytes(repaired)
        tree = parser.parse(source)  # of several in a row it sees the first only
    return tree, source


def _prepared(text: str) -> str:
    """Return a script without what the grammar misreads; the number of each line stays.

    Blanked are the bodies of here-documents, of which the grammar reads few forms; joined are words that go on after
    a backslash at the end of a line.
    """
    text = re.sub(r"[ \t]*\r?\n", "\n", text)  # a backslash, blanks, end of line: meant as a continuation
    text = re.sub(r"\\\s*\Z", "\n", text)  # and one at the end of the text continues nothing
    text = re.sub(r"(\$\{\w+:?[-=+])\[", rf"\1{BRACKET}", text)  # ${X:-[...]}: the grammar takes [ for a pattern
    text = re.sub(r"(\$\{\w+[%/#]{1,2}[^\s\[\]{}'\"]*)\]", rf"\1{CLOSING}", text)  # ${X%]}: ] for an end
    text = re.sub(r"(?<=[^\s$\\])\$(?=[)/`])", DOLLAR, text)  # $(grep x$): it knows no $ by itself
    text = re.sub(r"(\bexec[ \t]+)\{\w+\}(?=[<>])", r"\g<1>9", text)  # nor {NAME}, in which bash keeps a number
    text = re.sub(r"(\bexec[ \t]+\d+)<>", r"\1< ", text)  # nor <>
    text = _DEFAULT.sub(r"\1$[\2]}", text)  # ${X:-$((...))}: within ${ } the grammar has no arithmetic
    text = _TIMED.sub(r"\1", text)  # time { ...; }: the grammar makes words of what is timed
    text = _ARGUED.sub(r"\1; do", text)  # for x do
    text = re.sub(r";;?&(\s*esac\b)", r";;\1", text)  # the last of a case has nothing to go on with
    done: list[str] = []
    around: list[str] = []  # quotes and brackets that are open
    ends: list[
        tuple[str, bool, int, int, bool]
    ] = []  # of here-documents that begin on the next line: word, <<-, places
    at = joined = 0
    tests = False  # within [[ ]]
    while match := _TOKEN.search(text, at):
        token, inner = match[0], around[-1] if around else ""
        done.append(text[at : match.start()])
        at = match.end()
        if token == "`" and (note := re.compile(r"\s*#[^`\n]*`").match(text, at)):
            text = text[: match.start()] + " " * (note.end() - match.start()) + text[note.end() :]  # only a comment
            at = match.start()
            continue
        if token == "`" and (end := text.find("`", at)) > 0 and "\\" not in text[at:end]:
            text = f"{text[: match.start()]}$({text[at:end]}){text[end + 1 :]}"  # beside quotes it ends the word
            at = match.start()
            continue
        if token == "\\\n" and (inner == '"' or not (text[match.start() - 1].isspace() or text[at : at + 1].isspace())):
            token, joined = "", joined + 1
        elif (
            token in ("\\ ", "\\\t") and inner != '"' and not tests
        ):  # where a word begins with it, the grammar drops the blank
            token = f"'{token[1]}'"
        elif (
            _SIGN.fullmatch(token) and inner != '"'
        ):  # the last word of a test, which the grammar takes for an operator
            token = '"$HOME"' if token == "~" else f"'{token}'"
        elif (
            token in ("\\(", "\\)", "\\<", "\\>")
            and inner != '"'
            and _IN_BRACKETS.search(text[text.rfind("\n", 0, match.start()) + 1 : match.start()])
        ):
            token = token[1]  # within [ ] the grammar wants no backslash
        elif token in ("[[", "=", "]]") and inner != '"':
            if token == "=" and tests:  # which the grammar refuses in front of a pattern and &&
                token = "=="
            tests = token != "]]" and (tests or token == "[[")
            token += ";" * (token == "]]" and _GOES_ON.match(text, at) is not None)
        elif token == '"':
            around.pop() if inner == '"' else around.append(token)
        elif token[0] == "<" and token[-1] == ">" and inner not in ('"', "((") and not tests:  # a placeholder
            if not _SETS.search(text, max(0, match.start() - _FAR), match.start()):
                raise ValueError(f"line {text.count(_LINE, 0, at) + 1}: {token} {PLACEHOLDER}")
            token = f"{LESS}{token[1:-1]}{MORE}"
        elif token[0] == "$" and token[1:].isidentifier():  # `x-$NAME/y` and `10#$NAME` are misread, `x-${NAME}/y` not
            before, after = text[match.start() - 1 : match.start()], text[at : at + 1]
            within = before == "#" or before.strip("=,\"'") and after in ("/", ".", ":", "-")
            token = (
                f"${{{token[1:]}}}"
                if within or (inner not in ('"', "((") and _is_listed(text, match.start(), at))
                else token
            )
        elif token[0] == "$" and token[1:] in (*"@*#0123456789",):
            token = f"${{{token[1]}}}"
        elif token == "'" and inner != '"':
            end = text.find("'", at) + 1 or len(text)
            token, at = text[match.start() : end], end
        elif token in ("$(", "$((") or (token in ("(", "((") and inner != '"'):
            around.append(token.lstrip("$"))
        elif token in (")", "))") and inner and inner != '"':
            around.pop()
            if token == "))" and inner == "(":
                around = around[:-1] if around[-1:] == ["("] else around
        elif token[0] == "#" and inner != '"' and (match.start() == 0 or text[match.start() - 1].isspace()):
            end = text.find("\n", at)
            token, at = "", len(text) if end < 0 else end
        elif match["end"] and inner not in ('"', "(("):
            within = _SUBSTITUTED.search(text, 0, match.start()) is not None if around else False
            alone = within or all(sign == "(" for sign in around)
            ends.append((match["end"], token.startswith("<<-"), len(done), match.start(), alone))
            token = " " * len(token)
        elif token == "\n":
            if inner != '"':  # where lines are no text
                token, joined = token + "\n" * joined, 0
            first = text.rfind("\n", 0, at - 1) + 1
            line = text[first:at]
            for end_word, tabs, place, start, alone in ends:
                plain = end_word.strip("'\"\\")
                last = re.compile(rf"^\t*{re.escape(plain)}$", re.MULTILINE).search(text, at)
                end = last.end() if last else len(text)
                if alone and last and (_writes(line, start - first) or _SUBSTITUTED.search(line.partition("<<")[0])):
                    body = text[at : last.start()]
                    body = re.sub(r"(?m)^\t+", "", body) if tabs else body
                    done[place] = f" heredoc_{int(plain == end_word)}_{body.encode('utf-8', 'surrogatepass').hex()} "
                token += "\n" * text.count("\n", at, end)
                at = end
            ends = []
        done.append(token)
    return "".join(done) + text[at:]


def _is_listed(text: str, begin: int, end: int) -> bool:
    """Tell whether a name stands in a word without quotes that has a comma: `[$A/x,$B/y]` is misread."""
    first, last = _BEFORE_NAME.search(text[max(0, begin - _FAR) : begin]), _BEHIND_NAME.match(text, end)
    return "," in (first[0] if first else "") + (last[0] if last else "")


def _writes(line: str, at: int) -> bool:
    """Tell whether what becomes of the here-document at a place of a line is followed."""
    begin = max((match.end() for match in _BEFORE.finditer(line, 0, at)), default=0)
    behind = _BEHIND.search(line, at)
    command = line[begin : behind.start() if behind else len(line)]
    return any(map(_WRITES.search, (line, command)))


def _repairs(root: Node) -> Iterator[tuple[int, int, bytes]]:
    """Yield where the grammar misreads a script: the place, and the sign to put around it."""
    for node in nodes(root):
        if node.type in ("==", "=~") and _is_word(node):  # the grammar wants an operand after it, even outside [[ ]]
            yield node.start_byte, node.end_byte, b"'"
        elif node.type == "redirected_statement" and (body := node.child_by_field_name("body")) is not None:
            if body.type == "list":  # of `a && b > file` it gives the file to both
                yield body.children[-1].start_byte, body.children[-1].start_byte, b"{ "
                yield node.end_byte, node.end_byte, b" ;}"
        elif node.type == "command":  # after `A=x B=y` it takes the command of the next line to the same statement
            for child, after in itertools.pairwise(node.children):
                if child.type != "variable_assignment":
                    break
                between = (node.text or b"")[child.end_byte - node.start_byte : after.start_byte - node.start_byte]
                if b"\n" in between.replace(b"\\\n", b""):
                    yield child.end_byte, child.end_byte, b";"
        elif node.type == "negated_command" and source_of(node.children[-1]).startswith("{"):
            if end := _closed(root, node.children[-1].start_byte):  # `! { ...; }`, of which it makes words
                yield node.children[-1].start_byte, node.children[-1].start_byte, f"({GROUP}; ".encode()
                yield end, end, b")"


def _closed(root: Node, begin: int) -> int:
    """Return where the braces end that are opened at a place, 0 if nothing closes them."""
    open_ones = 0
    for node in nodes(root):
        signs = source_of(node).split() if node.start_byte >= begin and not node.children else []
        open_ones += signs.count("{") - signs.count("}")  # `{ [` is one word of the grammar
        if "}" in signs and not open_ones:
            return node.end_byte
    return 0


def _is_word(node: Node) -> bool:
    """Tell whether an operator stands where a word of a command was expected."""
    return node.parent is not None and node.parent.type in ("ERROR", "command")


def blanks_after_backslash(text: str) -> tuple[int, ...]:
    """Return the lines whose last backslash has a blank behind it: to a shell the command ends there."""
    lines = text.split("\n")
    found = [number for number, line in enumerate(lines[:-1], 1) if re.search(r"(?<!\\)(?:\\\\)*\\[ \t]+$", line)]
    return tuple(number for number in found if not lines[number - 1].lstrip().startswith("#") and lines[number].strip())


def placeholders(text: str) -> list[str]:
    """Return the lines on which a variable is set to a placeholder, NAME=<path>, each with the placeholder."""
    prepared = _prepared(text)
    found = re.finditer(f"{LESS}(.*?){MORE}", prepared)
    return [f"line {prepared.count(_LINE, 0, match.start()) + 1}: <{match[1]}>" for match in found]


def is_arithmetic(node: Node) -> bool:
    """Tell whether a statement is (( )), which the grammar takes for two subshells behind a !."""
    first, inner = node.children[:2]
    return first.type == "((" or (inner.type == "subshell" and first.end_byte == inner.start_byte)


def nodes(node: Node) -> Iterator[Node]:
    """Yield a node and all below it, in the order of the text."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(node.children)


def _mistake(root: Node, text: str) -> str:
    """Return what is wrong with a script, in one line."""
    if (merge := re.search(r"(?m)^<{7} .*$(?=[\s\S]*^={7}$[\s\S]*^>{7} )", text)) is not None:
        line = text.count("\n", 0, merge.start()) + 1
        return f"line {line}: {merge[0][:40]} begins a conflict of a merge: keep one of its two sides"
    quote = _open_quote(text)
    if quote is not None:
        line, around = text.count("\n", 0, quote) + 1, " ".join(text[max(0, quote - 30) : quote + 31].split())
        return f"line {line}: a quote ({text[quote]}) is opened and never closed: ...{around}"
    node = next((node for node in nodes(root) if node.is_missing or node.type == "ERROR"), root)  # `$[]` has neither
    if "\n" in source_of(node):  # all of the script, say: the keyword or bracket in it that nothing closes
        node = next(
            (child for child in reversed(node.children) if not child.is_named and child.type not in ";\n"), node
        )
    raw = text.encode("utf-8", "surrogatepass")
    line = raw.count(b"\n", 0, node.start_byte) + 1
    around = " ".join(raw[max(0, node.start_byte - 30) : node.start_byte + 30].decode("utf-8", "replace").split())
    sign = re.match(rb"[<>|&;]+", raw[node.start_byte :].lstrip())
    if sign and sign[0][:1] in (b"<", b">"):
        left = sign[0][:1].decode()
        return f"line {line}: {left} leads to no file: put quotes around text with < > | & ;: ...{around}"
    return f"line {line}: this cannot be parsed as bash: ...{around}"


def _open_quote(text: str) -> int | None:
    """Return the position of a quote that is never closed."""
    opened = None
    for match in re.finditer(r"\\.|(?:(?<=\s)|^)#[^\n]*|['\"]", text, re.DOTALL | re.MULTILINE):
        if match[0] in ("'", '"') and (opened is None or text[opened] == match[0]):
            opened = match.start() if opened is None else None
        elif opened is not None and text[opened] == "'" and match[0] == "\\'":
            opened = None  # no escape within single quotes
        elif opened is not None and match[0][0] == "#" and text[opened] in match[0]:
            opened = None
    return opened


def source_of(node: Node) -> str:
    """Return the text of a node as it stands in the script."""
    return shown(node.text or b"")


def line_of(node: Node) -> int:
    """Return the line on which a node begins, counted from 1."""
    return node.start_point[0] + 1


def active_parts(node: Node) -> Iterator[Node]:
    """Yield the outermost parts of a word that are more than literal text."""
    for child in node.children:
        if child.type in _ACTIVE:
            yield child
        else:
            yield from active_parts(child)
