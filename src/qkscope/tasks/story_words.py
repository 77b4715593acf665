"""Words for stories about people: names, things they give, places they go to, and what lasts for years.

Single tokens in SmolLM2's vocabulary (a test checks it), and common enough to be so in most. Each list is long enough
to be cut into three disjoint parts.
"""

from __future__ import annotations

_MEN = """
    John Tom James Dan Martin Andrew Simon Paul Mark Peter Adam Luke Jack Henry Robert David Michael Daniel Kevin Brian
    George Edward Matthew Richard Charles Thomas William Steven Jason Ryan Eric Scott Frank Justin Patrick Alex Tyler
    Aaron Nathan Carl Arthur Roger Joe Sean
"""
_WOMEN = """
    Mary Amy Sarah Alice Anna Lisa Emma Laura Susan Nancy Karen Linda Emily Jessica Sandra Michelle Carol Amanda Julia
    Rachel Rebecca Kate Jane Helen Diane Ruth Claire Grace Elizabeth Jennifer Victoria Maria Nicole Samantha Katherine
    Christine Heather Angela Melissa Stephanie Kelly Erin Christina Lauren
"""
_THINGS = """
    ring bone basketball computer necklace drink snack book pen gift ticket letter hat cup lamp coin ball map bell drum
    brush clock stone chair bottle camera phone guitar flag key
"""
_PLACES = """
    store garden restaurant school hospital office house station park market library museum church beach hotel farm
    theater bank kitchen bar club factory studio lake
"""
_EVENTS = """
    war trip plan deal fight project mission reign voyage battle strike study siege journey conflict crisis debate
    program festival famine drought dispute march treaty
"""
_PEOPLE = "friend cook leader teacher singer player writer dancer driver student doctor painter"

MEN, WOMEN = tuple(_MEN.split()), tuple(_WOMEN.split())
NAMES = tuple(name for pair in zip(MEN, WOMEN, strict=True) for name in pair)
THINGS, PLACES, EVENTS, PEOPLE = (tuple(words.split()) for words in (_THINGS, _PLACES, _EVENTS, _PEOPLE))
