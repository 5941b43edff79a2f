"""A critic or groups: which algorithm for which length of episode.  docs/records/critic-or-groups.md."""
