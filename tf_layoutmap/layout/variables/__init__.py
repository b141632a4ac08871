"""Variables on a mesh: written all or none by a step, saved as slices."""
