"""Prepared folders and run folders for tests of comparing: those of measuring."""

from ..evaluate.conftest import make_corpus, make_reader, make_run

__all__ = ["make_corpus", "make_reader", "make_run"]
