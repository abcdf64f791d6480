"""The acceptance rules: draft trees and the target's law in, accepted tokens out. Knows no drafter and no slots."""
