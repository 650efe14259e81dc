"""Matrix products whose rows do not depend on their neighbours."""
