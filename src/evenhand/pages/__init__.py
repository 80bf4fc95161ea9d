"""Pages for people: one template set, inline SVG plots, nothing loaded from elsewhere."""
