"""Run files → curves, statistics, one HTML file, a live page, a picture. Nothing here needs torch."""
