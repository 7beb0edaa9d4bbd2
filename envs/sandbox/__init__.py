"""Where code of the policy runs."""
