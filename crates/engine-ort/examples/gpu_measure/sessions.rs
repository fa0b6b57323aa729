//! The cost of lanes, their sessions and partitions: memory of the device and time, each when it is
//! made and at the first run of each size.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use downbeat_engine::{Cut, Engine, Share, StreamPriority};
use downbeat_engine_ort::cuda::{Device, Splitter, Stream};

use crate::Outcome;
use crate::arguments::Arguments;
use crate::partitions::half;
use crate::row::Row;
use crate::subject::{From, Subject};

const STEP: &str = "sessions";

/// `without`: the same engine without CUDA graphs.
pub fn measure(engine: &dyn Engine, without: &dyn Engine, arguments: &Arguments) -> Outcome<()> {
    let device = Device::open(0)?;
    for name in &arguments.models {
        let path = arguments.path(name);
        let segments = Cut::Stages(arguments.segments);
        for (what, engine, cut) in [
            ("whole", engine, Cut::Whole),
            ("whole, without graphs", without, Cut::Whole),
            (&*format!("{} segments", arguments.segments), engine, segments),
        ] {
            if let Err(error) = lanes(engine, arguments, &device, name, &path, what, cut) {
                Row::new(STEP, name, what).note(error.to_string()).print();
            }
        }
    }
    partitions(&device)
}

/// Memory of the device and time since the meter was started.
struct Meter<'a> {
    device: &'a Device,
    free: u64,
    begin: Instant,
}

impl Meter<'_> {
    fn start(device: &Device) -> Outcome<Meter<'_>> {
        Ok(Meter { device, free: device.free_memory()?, begin: Instant::now() })
    }

    fn row(&self, name: &str, what: String) -> Outcome<Row> {
        let ms = self.begin.elapsed().as_secs_f64() * 1e3;
        let taken = self.free as i64 - self.device.free_memory()? as i64;
        let note = format!("{:.1} MiB of the device", taken as f64 / f64::from(1 << 20));
        Ok(Row { ms: Some(ms), ..Row::new(STEP, name, what) }.note(note))
    }
}

/// A model's weights are copied with its first lane. Sessions are made with a lane or at its first
/// run of a size, graphs at a run of the size.
fn lanes(
    engine: &dyn Engine,
    arguments: &Arguments,
    device: &Device,
    name: &str,
    path: &Path,
    what: &str,
    cut: Cut,
) -> Outcome<()> {
    let file = std::fs::metadata(path)?.len() >> 20;
    let largest = arguments.batches.iter().copied().max().unwrap_or(1);
    let meter = Meter::start(device)?;
    let subject = Subject::load(engine, path, cut, largest)?;
    meter.row(name, format!("{what}: loaded, with a ring"))?.and(format!("the file has {file} MiB")).print();
    // The lane in a partition comes last, and shows whether sessions cost more in a partition.
    let mut kept = Vec::new();
    for (lane, share) in
        [("first lane", Share::Whole), ("second lane", Share::Whole), ("lane in a half", Share::Units(half()?))]
    {
        let meter = Meter::start(device)?;
        let mut made = subject.lane(share)?;
        meter.row(name, format!("{what}: {lane} made"))?.print();
        for batch in &arguments.batches {
            let meter = Meter::start(device)?;
            subject.run(&mut *made, *batch, From::Ring)?;
            let row = meter.row(name, format!("{what}: {lane}, first run"))?;
            Row { batch: Some(*batch), ..row }.print();
            // A graph is tried when a size comes again.
            let meter = Meter::start(device)?;
            let again = [(); 3].map(|()| subject.run(&mut *made, *batch, From::Ring));
            let again = again.into_iter().map(|ms| Ok(format!("{:.3}", ms?))).collect::<Outcome<Vec<_>>>()?;
            let row = meter.row(name, format!("{what}: {lane}, three more runs"))?;
            Row { batch: Some(*batch), ..row }.and(again.join(", ")).print();
        }
        kept.push(made);
    }
    Ok(())
}

/// Green contexts, with a stream in each.
fn partitions(device: &Arc<Device>) -> Outcome<()> {
    let meter = Meter::start(device)?;
    let splitter = Splitter::new(device)?;
    let note = format!("{} compute units in steps of {}", device.compute_units(), splitter.grain());
    meter.row("", "compute units grouped".into())?.and(note).print();
    let (mut parts, mut streams) = (Vec::new(), Vec::new());
    for units in (1..).map(|step| step * splitter.grain()).take_while(|units| *units < device.compute_units()) {
        let meter = Meter::start(device)?;
        match splitter.split(&[units]) {
            Ok(made) => {
                let sizes: Vec<u32> = made.iter().map(|part| part.compute_units()).collect();
                meter.row("", format!("{} partitions made", made.len()))?.and(format!("{sizes:?} units")).print();
                let meter = Meter::start(device)?;
                let stream = |part| Stream::with_priority(device, Some(part), StreamPriority::Default);
                streams.extend(made.iter().map(stream).collect::<Result<Vec<_>, _>>()?);
                meter.row("", "a stream of each made".into())?.print();
                parts.extend(made);
            }
            Err(error) => Row::new(STEP, "", format!("partition of {units} units")).note(error.to_string()).print(),
        }
    }
    let note = format!("{} partitions and {} streams at once", parts.len(), streams.len());
    Row::new(STEP, "", "ladder").note(note).print();
    Ok(())
}
