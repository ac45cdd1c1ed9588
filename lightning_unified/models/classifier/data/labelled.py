"""A labelled text, and 48 built-in sentences in three classes.

The sentences were written for tests and demonstrations.
"""

from dataclasses import dataclass

__all__ = ["LabelledText", "texts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledText:
    """One text and its class.

    Attributes:
        text: The original text, without any cleaning.
        label: The name of its class.
        group: A split keeps texts of one group (sentences of a review) together; empty for a single text.
        is_test: Whether it is in an official test set.
    """

    text: str
    label: str
    group: str = ""
    is_test: bool = False


_TEXTS = {
    "electrics": (
        "The battery is flat again and the starter only clicks.",
        "A fuse blows whenever the lamp on the left is switched on.",
        "The alternator gives twelve volts, which is too little to charge.",
        "Green corrosion covers the battery clamp and the ground cable.",
        "Her radio goes silent when the wiper relay clicks.",
        "We measured the voltage at the lamp and found a broken wire.",
        "The wire to the sensor has rubbed through on the frame.",
        "Every lamp is dim until the alternator belt is tightened.",
        "A new relay and a clean fuse brought the heater back.",
        "The cable to the starter gets hot within ten seconds.",
        "No current flows through the switch of the work lamp.",
        "Charge the battery overnight and test each cell in the morning.",
        "The horn sounds by itself when rain gets into its wire.",
        "Somebody put a fuse of thirty amperes where ten belong.",
        "The voltage drops to nine when the starter turns.",
        "An insulated cable was pinched under the cab and shorted.",
    ),
    "engine": (
        "The engine smokes black under load and smells of diesel.",
        "Coolant drips from the pump behind the radiator.",
        "It starts well but stalls once the fuel filter clogs.",
        "White smoke in the morning, and the coolant slowly disappears.",
        "The turbo whistles, and there is oil in the intake pipe.",
        "An injector knocks at idle and is quiet at full speed.",
        "We changed the oil and found bright metal in the filter.",
        "The radiator is full of chaff, so the engine overheats uphill.",
        "Idle speed hunts up and down until the fuel is bled.",
        "The thermostat sticks, and the engine never gets warm.",
        "Blue smoke follows every gear change of the old diesel.",
        "Water in the fuel froze in the filter last night.",
        "Compression is low on the third cylinder, and it burns oil.",
        "The fan belt squeals when the engine is cold and wet.",
        "Replace the injector seal before the fuel washes the cylinder.",
        "A cracked exhaust makes the turbo slow to answer.",
    ),
    "hydraulics": (
        "The boom sinks although the lever stands in neutral.",
        "Hydraulic oil foams in the tank because the suction hose leaks air.",
        "A hose burst at the bucket cylinder and sprayed the yard.",
        "The pump whines until the hydraulic oil is warm.",
        "The bucket curls slowly when the boom is raised too.",
        "Scored rods tell that dirt got past the wiper of the cylinder.",
        "Pressure at the relief valve is forty bar too low.",
        "The spool of the control valve sticks in one direction.",
        "Steering is heavy because the priority valve is stuck.",
        "Change the return filter, the hydraulic pump is starving.",
        "One track motor drags, and its case drain hose is hot.",
        "The outrigger cylinder creeps in, so its holding valve leaks.",
        "We set the relief pressure and the boom lifts again.",
        "The quick coupler weeps oil on to the bucket pin.",
        "A pinched hose behind the valve block slows the swing.",
        "The accumulator has lost its gas, and the pressure pulses.",
    ),
}


def texts() -> list[LabelledText]:
    """Return all built-in texts, class by class."""
    return [LabelledText(text=text, label=label) for label, group in _TEXTS.items() for text in group]
