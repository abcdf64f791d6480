"""Grammars that outputs must follow, compiled with llguidance."""

from eyas.grammar.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
