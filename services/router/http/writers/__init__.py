"""Answers, whole and streamed, in the shapes of the APIs."""
