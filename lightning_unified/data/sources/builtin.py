"""A dozen records and a dozen short texts, written for tests and demonstrations.

They are far too few to train a useful model. Every text and every record is a group.
"""

from lightning_unified.data.documents.document import Document
from lightning_unified.data.documents.record import Record

__all__ = ["documents"]

_TEXTS = (
    "The pump fills the tank until the float lifts the switch. When the switch opens, the pump stops and the valve closes.",
    "A lamp that flickers has a loose plug more often than a bad bulb. Push the plug in before you buy anything.",
    "Grease the pins every ten hours. Wipe the old grease away first, or the sand in it goes into the bearing with the new.",
    "Cold oil is thick and slow. Let the engine idle for two minutes before you ask the pump for full pressure.",
    "The dog sleeps under the bench while the lathe runs. It wakes when the lathe stops, because the silence is new.",
    "Measure the voltage at the battery, then at the starter. The difference is what the cable keeps for itself.",
    "In winter the harbour is quiet. Two cranes stand against the grey sky and a single barge waits for its load of gravel.",
    "A belt that squeals is too loose or too smooth. Chalk shows which: if the noise goes away, it was too smooth.",
    "She wrote the hours of every machine in a small green book. Years later the book knew more than the factory did.",
    "Water in the fuel settles at the bottom of the filter bowl. Open the drain until what comes out is clear and smells of fuel.",
    "The mountain road has forty bends. A driver who brakes before each of them needs new brakes at the top.",
    "Write the torque on the housing with a paint marker. The next mechanic will thank you, and it may be you.",
)

_RECORDS = (
    Record(
        equipment="Wheel loader",
        symptom="Bucket sinks slowly with the lever in neutral",
        error_codes=("HYD-204",),
        probable_cause="Worn piston seal in the lift cylinder",
        solution="Block the boom, cap the cylinder lines and repeat the test; reseal the cylinder that still moves.",
    ),
    Record(
        equipment="Tracked excavator",
        symptom="Engine loses speed when the boom and the swing work together",
        error_codes=("P0087", "SPN 157"),
        probable_cause="Fuel rail pressure falls because the fuel filter is clogged",
        solution="Change both fuel filters, bleed the system and read the rail pressure under load.",
    ),
    Record(
        equipment="Farm tractor",
        symptom="Starter turns slowly on cold mornings",
        error_codes=("SPN 168 FMI 1",),
        probable_cause="High resistance between the battery and the starter",
        solution="Clean the clamps and the ground strap; the drop over the cable must stay below half a volt.",
    ),
    Record(
        equipment="Dump truck",
        symptom="Coolant is hot on the climb and normal on the level",
        error_codes=("P0217",),
        probable_cause="Radiator fins packed with dust",
        solution="Blow the core out against the direction of the air; check the fan belt while the guard is off.",
    ),
    Record(
        equipment="Forklift",
        symptom="Mast stops half way up",
        error_codes=("E1042",),
        probable_cause="Lift limit switch bent out of its place",
        solution="Straighten the bracket and set the switch to the mark on the mast.",
    ),
    Record(
        equipment="Compressor",
        symptom="Safety valve opens although the gauge shows normal pressure",
        probable_cause="Gauge line blocked, so that the gauge reads too low",
        solution="Compare with a test gauge at the tank; clear the line or change the gauge.",
    ),
    Record(
        equipment="Delivery van",
        symptom="Rough idle, exhaust smells of fuel",
        error_codes=("P0172",),
        probable_cause="Fuel pressure regulator leaks into its vacuum hose",
        solution="Pull the hose; change the regulator if fuel drips from it.",
    ),
    Record(
        equipment="Road roller",
        symptom="Vibration drops out when the drum reverses",
        error_codes=("U0121",),
        probable_cause="Chafed data cable at the articulation joint",
        solution="Move the joint by hand while you watch the bus; repair the cable and tie it clear of the pin.",
    ),
    Record(
        equipment="Combine harvester",
        symptom="Unloading auger does not swing out",
        error_codes=("B0420",),
        probable_cause="Water in the switch of the ladder interlock",
        solution="Dry and seal the switch; the auger moves again once the ladder reads as folded.",
    ),
    Record(
        equipment="Diesel generator",
        symptom="Hunts between two speeds without load",
        error_codes=("SPN 190 FMI 2",),
        probable_cause="Dirt on the speed sensor at the flywheel",
        solution="Clean the sensor tip and set the gap that its plate names.",
    ),
    Record(
        equipment="City bus",
        symptom="Brake lamp stays on, pedal feels normal",
        error_codes=("C0265",),
        probable_cause="Relay of the anti-lock unit sticks",
        solution="Change the relay, then drive a loop with three firm stops and read the memory again.",
    ),
    Record(
        equipment="Skid steer",
        symptom="Pulls to the left at every speed",
        probable_cause="Charge pressure of the right drive pump is low",
        solution="Swap the two charge hoses: if it now pulls to the right, rebuild the pump; if not, look at the motor.",
    ),
)


def documents() -> list[Document]:
    """Return the texts, then the records."""
    texts = [Document(group=f"builtin text {number}", text=text) for number, text in enumerate(_TEXTS)]
    records = [Document(group=f"builtin record {number}", record=record) for number, record in enumerate(_RECORDS)]
    return [*texts, *records]
