"""The page that shows runs, `outloop view`: what their folders hold, read only."""
