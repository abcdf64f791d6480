"""Every drafting method over the same prompts: methods in, the table of speedups and acceptance lengths out."""
