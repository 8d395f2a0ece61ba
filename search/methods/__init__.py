"""Methods of search: what to try next, and which trials to go on with. Pure: no Ray, no processes, no clock."""
