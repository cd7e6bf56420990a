#!/usr/bin/env python3
"""Gathers what the site of documents is made of: docs_site.py ROOT FOLDER; scripts/docs.sh calls it, then mkdocs.

Documents keep their places, so that links between them hold there as they do in the repository. Pages of reference are
made of the headers (comments and declarations) and, by mkdocstrings, of the docstrings of the package."""

import re
import shutil
import sys
from pathlib import Path

TREES = ("docs", "bench", "data", "examples")  # of which documents and pictures are taken
FILES = ("README.md", "HACKING.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
PICTURES = (".png", ".svg")
PYTHON = ("sparge", "sparge.torch", "sparge.integrations.transformers", "sparge.integrations.diffusers", "sparge.ggml", "sparge.compat",
          "sparge.distributed", "sparge.distributed.transformers", "sparge.eval")
MORE_PYTHON = "python/sparge/integrations"  # other modules there join if they are public

C_INTRODUCTION = """# C interface

Made from `include/sparge/sparge.h`. Start with [C and C++](docs/cpp.md).
"""
MPI_INTRODUCTION = """# C interface on MPI

Made from `include/sparge/sparge_mpi.h`. Start with [several machines](docs/distributed.md#mpi).
"""
CPP_INTRODUCTION = """# C++ interface

Made from `include/sparge/sparge.hpp`, which adds ownership, exceptions and views to the [C interface](api-c.md). Start with
[C and C++](docs/cpp.md).
"""
PYTHON_INTRODUCTION = """# Python interface

Made from the docstrings. Start with [Python](docs/python.md).
"""


def gather(root, folder):
    for name in FILES:
        shutil.copyfile(root / name, folder / name)
    for tree in TREES:
        for file in (root / tree).rglob("*"):
            if file.suffix in (".md", *PICTURES) and "results" not in file.parts:
                to = folder / file.relative_to(root)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, to)


def plain(comment):
    """The text of a comment. What is set apart in it (a formula, a table) stays so."""
    lines = [re.sub(r"^\s*(?:/\*|\*/|\*|//) ?", "", line).replace("*/", "").rstrip() for line in comment.strip().splitlines()]
    return "\n".join(lines).strip()


def prose(text):
    """As Markdown: names as code, and nothing else taken for markup."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):  # the others are code already
        words = re.split(r"\b((?:sparge|SPARGE)_\w+)", parts[i])
        parts[i] = "".join(f"`{word}`" if j % 2 else re.sub(r"[<>*_|\[\]]", r"\\\g<0>", word) for j, word in enumerate(words))
    return "`".join(parts)


def split_comment(chunk, opening):
    """(the comment that a chunk begins with, the rest)."""
    if opening == "/*":
        found = re.match(r"\s*(/\*.*?\*/)[ \t]*\n(.*)", chunk, re.DOTALL)
    else:
        found = re.match(r"((?:\s*//[^\n]*\n)+)(.*)", chunk, re.DOTALL)
    return (plain(found[1]), found[2]) if found else ("", chunk)


def title_of(code):
    """What a chunk declares first."""
    for pattern in (r"typedef (?:struct|enum) (\w+)", r"SPARGE_API[^(]*?\b(sparge_\w+)\(", r"typedef \w+ \(\*(\w+)\)", r"#define (\w+)",
                    r"static inline \w+ (\w+)\(", r"typedef struct \w+ (\w+);", r"(?:class|struct) (\w+)", r"using (\w+)",
                    r"(?:inline|constexpr)[^(=]*?\b(\w+)\s*[(=]", r"\b(\w+)\("):
        found = re.search(pattern, code)
        if found:
            return found[1]
    return None


def c_items(text):
    """Sections and declarations of the C header: ("section", title) or ("item", comment, code)."""
    text = text[text.index('extern "C" {\n#endif') : text.rindex("#ifdef __cplusplus")]
    text = text.replace('extern "C" {\n#endif\n', "", 1)
    for part in re.split(r"(?=^/\* -{10,})", text, flags=re.MULTILINE):
        found = re.match(r"/\* -+ (.*?) \*/\n", part)
        if found:
            yield "section", found[1]
            part = part[found.end() :]
        # A declaration ends where a comment, or an empty line outside braces, begins the next.
        for chunk in chunks(part, r"^(?=/\*)"):
            yield "item", *split_comment(chunk, "/*")


def chunks(text, start):
    """Pieces at depth 0 of braces: they end at empty lines, and where `start` matches after code."""
    piece, depth, has_code = [], 0, False
    for line in text.splitlines(keepends=True):
        begins = depth == 0 and re.match(start, line) and has_code
        if (begins or (depth == 0 and not line.strip())) and piece:
            yield "".join(piece)
            piece, has_code = [], False
        if line.strip() or depth:
            piece.append(line)
        has_code = has_code or not re.match(r"\s*(/\*|\*|//|$)", line)
        code = re.sub(r'"[^"]*"|//.*|/\*.*?\*/', "", line)
        depth += code.count("{") - code.count("}")
    if piece:
        yield "".join(piece)


def cpp_items(text):
    text = text[text.index("inline namespace SPARGE_HPP_NAMESPACE {") : text.rindex("}  // namespace sparge")]
    text = text.split("\n", 1)[1].rsplit("}", 1)[0]
    for chunk in chunks(text, r"^(?=//)"):
        comment, code = split_comment(chunk, "//")
        yield "item", comment, re.sub(r"\n\n? private:\n.*?(?=^};)", "\n", code, flags=re.DOTALL | re.MULTILINE)


def reference(introduction, opening, items, language):
    lines, titles = [introduction, prose(opening), ""], set()
    for kind, *rest in items:
        if kind == "section":
            lines += [f"## {rest[0][0].upper()}{rest[0][1:]}", ""]
            continue
        comment, code = rest
        title = title_of(code)
        if title and title not in titles:
            titles.add(title)
            lines += [f"### {title}", ""]
        if comment:
            lines += [prose(comment), ""]
        if code.strip():
            lines += [f"```{language}", code.replace("SPARGE_API ", "").rstrip(), "```", ""]
    return "\n".join(lines), titles


def public_modules(root):
    others = sorted(f"sparge.integrations.{file.stem}" for file in (root / MORE_PYTHON).glob("[a-z]*.py"))
    return [*PYTHON, *(name for name in others if name not in PYTHON)]


def write_c_reference(root, name, introduction, least, to):
    header = (root / "include/sparge" / name).read_text("utf-8")
    page, titles = reference(introduction, plain(header[: header.index("*/")]), c_items(header), "c")
    functions = set(re.findall(r"^SPARGE_API[^(]*?\b(sparge_\w+)\(", header, re.MULTILINE))
    absent = {name for name in functions if name not in page}
    if absent or len(titles) < least:
        raise SystemExit(f"docs_site.py: of {name} these are on no page: {', '.join(sorted(absent)) or 'most'}")
    to.write_text(page, "utf-8")


def write_reference(root, folder):
    write_c_reference(root, "sparge.h", C_INTRODUCTION, 30, folder / "api-c.md")
    write_c_reference(root, "sparge_mpi.h", MPI_INTRODUCTION, 4, folder / "api-mpi.md")
    header = (root / "include/sparge/sparge.hpp").read_text("utf-8")
    page, titles = reference(CPP_INTRODUCTION, "", cpp_items(header), "cpp")
    absent = set(re.findall(r"^(?:class|struct) (\w+)", header, re.MULTILINE)) - {word for word in re.findall(r"\w+", page)}
    if absent or len(titles) < 10:
        raise SystemExit(f"docs_site.py: of sparge.hpp these are on no page: {', '.join(sorted(absent)) or 'most'}")
    (folder / "api-cpp.md").write_text(page, "utf-8")
    modules = [f"## {name}\n\n::: {name}\n" for name in public_modules(root)]
    (folder / "api-python.md").write_text("\n".join([PYTHON_INTRODUCTION, *modules]), "utf-8")


def main():
    root, folder = (Path(argument).resolve() for argument in sys.argv[1:3])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    gather(root, folder)
    write_reference(root, folder)


if __name__ == "__main__":
    main()
