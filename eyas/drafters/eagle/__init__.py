"""EAGLE in this process: committed tokens and features in, dynamic draft trees out."""
