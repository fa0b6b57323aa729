//! The compute units on which the blocks of a kernel run: in each partition, enqueued and as a
//! graph, alone and while the other partition is busy.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use downbeat_engine::StreamPriority;
use downbeat_engine_ort::cuda::{Device, Event, Splitter, Stream};

use crate::Outcome;
use crate::kernels::{Kernel, Places, Replay};
use crate::partitions::half;
use crate::row::Row;

const STEP: &str = "census";
/// Blocks for each unit of the device: enough for two partitions to run beside each other for a
/// while.
const BLOCKS: u32 = 16;
/// How long a block stays, in ticks of a unit's clock: some 50 us.
const TICKS: u64 = 80_000;

/// How many blocks ran on each unit.
struct Census(BTreeMap<u32, u32>);

impl Census {
    fn of(places: &Places) -> Outcome<Census> {
        let mut blocks = BTreeMap::new();
        places.read()?.into_iter().for_each(|unit| *blocks.entry(unit).or_default() += 1);
        Ok(Census(blocks))
    }

    /// How many units both censuses have.
    fn shared(&self, other: &Census) -> usize {
        self.0.keys().filter(|unit| other.0.contains_key(unit)).count()
    }
}

impl fmt::Display for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units: Vec<u32> = self.0.keys().copied().collect();
        let runs = units.chunk_by(|a, b| a + 1 == *b).filter_map(|run| Some((*run.first()?, *run.last()?)));
        let runs: Vec<String> = runs.map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
        let (least, most) = (self.0.values().min().unwrap_or(&0), self.0.values().max().unwrap_or(&0));
        write!(f, "{} units: {}; {least} to {most} blocks on each", units.len(), runs.join(", "))
    }
}

/// A partition of the device, of two.
struct Side {
    what: String,
    stream: Arc<Stream>,
    places: Places,
    replay: Replay,
    begin: Event,
    end: Event,
}

impl Side {
    fn new(device: &Arc<Device>, kernel: &Kernel, stream: Arc<Stream>) -> Outcome<Side> {
        let units = stream.partition().map_or(device.compute_units(), |partition| partition.compute_units());
        let what = format!("{units} of {} units", device.compute_units());
        let places = Places::new(BLOCKS * device.compute_units())?;
        let replay = Replay::record(&stream, || kernel.stay(&stream, &places, TICKS))?;
        Ok(Side { what, replay, places, stream, begin: Event::timed(device)?, end: Event::timed(device)? })
    }

    /// Begins on this side's stream. A graph runs in this stream too, no matter which side recorded
    /// it.
    fn begin(&self, kernel: &Kernel, graph: Option<&Side>) -> Outcome<()> {
        self.stream.record(&self.begin)?;
        match graph {
            Some(side) => side.replay.launch(&self.stream)?,
            None => kernel.stay(&self.stream, &self.places, TICKS)?,
        }
        Ok(self.stream.record(&self.end)?)
    }

    /// Waits for the end; `places` tells where the blocks ran.
    fn told(&self, how: &str, places: &Places, other: Option<&Census>) -> Outcome<Census> {
        self.stream.finish()?;
        let census = Census::of(places)?;
        let shared = other.map(|other| format!("; {} units shared with the other", census.shared(other)));
        let ms = self.end.since(&self.begin)?.as_nanos() as f64 / 1e6;
        let row = Row { ms: Some(ms), ..Row::new(STEP, "", format!("{}, {how}", self.what)) };
        row.note(format!("{census}{}", shared.unwrap_or_default())).print();
        Ok(census)
    }
}

pub fn measure() -> Outcome<()> {
    let device = Device::open(0)?;
    let kernel = match Kernel::load(&device) {
        Ok(kernel) => kernel,
        Err(error) => {
            Row::new(STEP, "", "not run").note(error.to_string()).print();
            return Ok(());
        }
    };
    let whole = Side::new(&device, &kernel, Stream::new(&device)?)?;
    whole.begin(&kernel, None)?;
    whole.told("alone", &whole.places, None)?;
    let splitter = Splitter::new(&device)?;
    let mut sizes = vec![splitter.grain(), 2 * splitter.grain(), half()?];
    sizes.dedup();
    for units in sizes {
        if let Err(error) = pair(&device, &kernel, &splitter, units) {
            Row::new(STEP, "", format!("{units} units and the others")).note(error.to_string()).print();
        }
    }
    Ok(())
}

fn pair(device: &Arc<Device>, kernel: &Kernel, splitter: &Splitter, units: u32) -> Outcome<()> {
    let sides = splitter.split(&[units])?;
    let sides = sides.iter().map(|partition| {
        Side::new(device, kernel, Stream::with_priority(device, Some(partition), StreamPriority::Default)?)
    });
    let [one, other] = &sides.collect::<Outcome<Vec<Side>>>()?[..] else {
        return Err("the device was not parted in two".into());
    };
    for (how, graphs) in [("", false), (" as a graph", true)] {
        let graph = |side| graphs.then_some(side);
        one.begin(kernel, graph(one))?;
        let alone = one.told(&format!("alone{how}"), &one.places, None)?;
        other.begin(kernel, graph(other))?;
        other.told(&format!("alone{how}"), &other.places, Some(&alone))?;
        // Both at once: where each side runs, and whether it takes longer.
        one.begin(kernel, graph(one))?;
        other.begin(kernel, graph(other))?;
        let beside = one.told(&format!("beside the other{how}"), &one.places, None)?;
        other.told(&format!("beside the other{how}"), &other.places, Some(&beside))?;
    }
    // Does a graph run on the units of the stream that recorded it, or of the stream that it is
    // launched in?
    other.begin(kernel, Some(one))?;
    other.told("a graph recorded in the other", &one.places, None)?;
    Ok(())
}
