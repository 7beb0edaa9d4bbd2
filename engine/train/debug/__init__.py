"""Tools that repeat or explain one step."""
