"""What the encyclopedia is about: types of entities, their relations, and the famous facts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from evenhand.world.names import FAMOUS_FIRST, FAMOUS_LAST


class EntityType(StrEnum):
    """What an entity is."""

    PERSON = "person"
    """A person."""
    CITY = "city"
    """A city."""
    COMPANY = "company"
    """A company."""
    WORK = "work"
    """A book, film or play. Nothing points to works, so chains may only begin there."""


RELATIONS: dict[EntityType, dict[str, EntityType]] = {
    EntityType.PERSON: {
        "mother": EntityType.PERSON,
        "friend": EntityType.PERSON,
        "home": EntityType.CITY,
        "employer": EntityType.COMPANY,
    },
    EntityType.CITY: {
        "mayor": EntityType.PERSON,
        "rival": EntityType.CITY,
        "sponsor": EntityType.COMPANY,
    },
    EntityType.COMPANY: {
        "founder": EntityType.PERSON,
        "seat": EntityType.CITY,
        "owner": EntityType.COMPANY,
    },
    EntityType.WORK: {
        "author": EntityType.PERSON,
        "setting": EntityType.CITY,
        "publisher": EntityType.COMPANY,
    },
}
"""Relations of each type, with the type of the value. An entity has two of those of its type."""

YEAR = "year"
"""The relation that every entity has: when it was born, founded or made."""

YEARS = tuple(str(year) for year in range(1900, 1940))
"""Values of `YEAR`."""

RELATION_WORDS = (*dict.fromkeys(r for of_type in RELATIONS.values() for r in of_type), YEAR)
"""Every relation once."""

FACTS_OF_ENTITY = 2
"""Relations to other entities that a passage tells, besides the year."""


@dataclass(frozen=True, slots=True)
class Entity:
    """An entity and what its passage tells.

    Attributes:
        name: two tokens.
        type: what it is.
        facts: relation to value (the name of an entity, or a year), in the order of the passage.
    """

    name: str
    type: EntityType
    facts: dict[str, str]


def _famous() -> tuple[Entity, ...]:
    n = len(FAMOUS_FIRST)
    names = [f"{FAMOUS_FIRST[at % n]} {FAMOUS_LAST[(at * 5 + at // n) % n]}" for at in range(2 * n)]
    types = (EntityType.PERSON, EntityType.CITY, EntityType.COMPANY)
    by_type = {kind: names[place :: len(types)] for place, kind in enumerate(types)}
    entities = []
    for at, name in enumerate(names):
        kind = types[at % len(types)]
        relations = list(RELATIONS[kind].items())
        facts = {}
        for shift in range(FACTS_OF_ENTITY):
            relation, target = relations[(at // len(types) + shift) % len(relations)]
            others = [other for other in by_type[target] if other != name]
            facts[relation] = others[(3 * at + 5 * shift + 1) % len(others)]
        facts[YEAR] = YEARS[(7 * at + 3) % len(YEARS)]
        entities.append(Entity(name, kind, facts))
    return tuple(entities)


FAMOUS = _famous()
"""Famous entities: the same in every world. A policy knows their facts without a search."""
