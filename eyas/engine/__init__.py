"""The engine: scheduler, runner, drafting and acceptance, one step at a time."""
