"""The words that tasks are made of: objects for boxes, and thirteen categories for lists.

Plain, common, and mostly one token in today's vocabularies. Each list is long enough to be cut into three disjoint
parts: words for choosing heads, for fitting and for testing.
"""

from __future__ import annotations

_OBJECTS = """
    egg fan tea engine plate gift wire watch cross boat game rose shell seed magnet suit ticket glass tie hat
    jam cat book pen cup key ring lamp coin ball map bell drum brush clock stone bread milk chair bottle radio
    flag rope knife fork spoon bag belt boot coat mask card chain wheel candle mirror pillow blanket towel soap
    comb needle button ribbon basket bucket ladder hammer nail screw saw shovel rake tent torch compass camera
    phone guitar flute piano violin letter stamp envelope magazine dish bowl pan kettle oven toy doll kite
    puzzle medal trophy crown sword shield
"""
OBJECTS = tuple(_OBJECTS.split())

BOXES = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

_WORDS = {
    "fruits": "apple banana orange grape peach pear plum cherry mango lemon lime melon kiwi fig apricot coconut "
              "papaya strawberry blueberry raspberry pineapple watermelon grapefruit date",
    "animals": "dog cat horse cow pig sheep goat lion tiger bear wolf fox rabbit mouse elephant giraffe monkey "
               "zebra deer camel kangaroo squirrel donkey hamster",
    "vehicles": "car bus truck train bike van boat ship taxi tram plane jet ferry yacht scooter motorcycle tractor "
                "helicopter ambulance bicycle canoe subway limousine wagon",
    "drinks": "tea coffee milk water juice beer wine soda lemonade cider whiskey vodka rum gin cocoa champagne "
              "espresso latte smoothie tequila brandy cola punch ale",
    "countries": "France Spain Italy Germany China Japan India Brazil Canada Mexico Egypt Kenya Peru Chile Greece "
                 "Turkey Russia Norway Sweden Poland Ireland Portugal Cuba Iran",
    "sports": "soccer tennis golf hockey rugby cricket boxing baseball basketball volleyball swimming skiing "
              "wrestling cycling rowing fencing archery surfing karate judo badminton handball polo squash",
    "birds": "eagle hawk owl crow robin sparrow pigeon parrot swan duck goose turkey raven falcon heron stork "
             "pelican penguin flamingo peacock seagull woodpecker finch dove",
    "fish": "salmon tuna trout cod shark carp bass herring sardine mackerel eel pike perch halibut flounder "
            "anchovy catfish haddock snapper tilapia sturgeon barracuda swordfish sole",
    "cities": "Paris London Berlin Madrid Rome Tokyo Beijing Moscow Cairo Delhi Sydney Boston Chicago Dallas "
              "Seattle Toronto Vienna Prague Dublin Lisbon Athens Oslo Mumbai Bangkok",
    "states": "Texas Ohio Utah Iowa Maine Kansas Oregon Nevada Florida Georgia Alabama Alaska Arizona Colorado "
              "Idaho Indiana Kentucky Michigan Montana Nebraska Vermont Virginia Wyoming Hawaii",
    "foods": "bread rice pasta pizza soup salad cheese burger sandwich steak bacon sausage noodles pancake waffle "
             "omelette curry stew pie cake toast butter yogurt cereal",
    "male names": "John James Robert Michael William David Richard Thomas Charles Daniel Matthew Mark Paul Steven "
                  "Andrew Kevin Brian George Edward Peter Henry Jack Adam Luke",
    "female names": "Mary Patricia Jennifer Linda Elizabeth Barbara Susan Jessica Sarah Karen Nancy Lisa Margaret "
                    "Sandra Ashley Emily Donna Michelle Carol Amanda Anna Julia Emma Alice",
}  # fmt: skip
CATEGORIES: dict[str, list[str]] = {name: words.split() for name, words in _WORDS.items()}
FIVE = ("fruits", "animals", "vehicles", "drinks", "countries")
