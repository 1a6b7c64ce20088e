"""The routes of the page, by subject, and which metrics its route for Prometheus has."""
