"""What everything else is built on: stage protocols, recipes, token layouts, statistics."""
