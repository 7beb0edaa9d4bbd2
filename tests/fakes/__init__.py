"""Small programs that stand in for what the tests cannot have: servers, agents, bad networks."""
