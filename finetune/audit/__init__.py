"""Finds probably wrong labels and near duplicates."""
