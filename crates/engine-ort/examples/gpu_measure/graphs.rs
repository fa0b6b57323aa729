//! Whether models become CUDA graphs, with their nodes or the reason, and how large grids the
//! libraries choose in a partition.

use std::collections::BTreeMap;

use downbeat_engine::{Cut, Engine, GraphNodes, GraphOutcome, GraphReport, Share};

use crate::Outcome;
use crate::arguments::Arguments;
use crate::partitions::half;
use crate::row::{Row, quantile};
use crate::subject::{From, Subject, span};

/// Runs of a size: the first ones decide whether it becomes a graph.
const RUNS: usize = 20;

/// Measures graphs. `without` is the same engine without CUDA graphs.
pub fn measure(engine: &dyn Engine, without: &dyn Engine, arguments: &Arguments) -> Outcome<()> {
    const STEP: &str = "graphs";
    let segments = format!("{} segments", arguments.segments);
    // The loop measures one thing of all models before the next thing.
    for (what, engine, cut) in [
        ("whole", engine, Cut::Whole),
        ("whole, without graphs", without, Cut::Whole),
        (&segments, engine, Cut::Stages(arguments.segments)),
    ] {
        for name in &arguments.models {
            let told = || -> Outcome<()> {
                let largest = arguments.batches.iter().copied().max().unwrap_or(1);
                let subject = Subject::load(engine, &arguments.path(name), cut.clone(), largest)?;
                let mut lane = subject.lane(Share::Whole)?;
                for batch in &arguments.batches {
                    let mut millis = Vec::new();
                    let mut spans = Vec::new();
                    for _ in 0..RUNS {
                        millis.push(subject.run(&mut *lane, *batch, From::Ring)?);
                        spans.push(span(&*lane));
                    }
                    let note = format!("on the device {:.3} ms", quantile(&mut spans, 0.5).unwrap_or(f64::NAN));
                    Row::new(STEP, name, what).runs(*batch, 1, &mut millis).note(note).print();
                }
                for report in subject.model.graphs() {
                    let segment = format!("{what}, segment {} of {}", report.segment + 1, subject.model.segments());
                    let row = Row { batch: rows(&report), ..Row::new(STEP, name, segment) };
                    row.note(format!("{:?}: {}", report.shapes, words(&report.outcome))).print();
                }
                Ok(())
            };
            if let Err(error) = told() {
                Row::new(STEP, name, what).note(error.to_string()).print();
            }
        }
    }
    Ok(())
}

/// Kernels of a model in partitions: their grids beside the grids on the whole device, and the time
/// of the batch.
pub fn grids(engine: &dyn Engine, arguments: &Arguments) -> Outcome<()> {
    const STEP: &str = "grids";
    let largest = arguments.batches.iter().copied().max().unwrap_or(1);
    for name in &arguments.models {
        let subject = Subject::load(engine, &arguments.path(name), Cut::Whole, largest)?;
        let mut whole = BTreeMap::new();
        for share in [Share::Whole, Share::Units(half()?), Share::Units(16)] {
            let mut lane = subject.lane(share)?;
            for batch in &arguments.batches {
                let mut spans = Vec::new();
                for run in 0..RUNS {
                    subject.run(&mut *lane, *batch, From::Ring)?;
                    spans.extend((run > 4).then(|| span(&*lane)));
                }
                // The graphs of earlier lanes went with their lanes.
                let reports = subject.model.graphs();
                let report = reports.iter().find(|report| rows(report) == Some(*batch));
                let nodes = report.and_then(|report| nodes(&report.outcome)).cloned().unwrap_or_default();
                let mut note = report.map_or("there is no report".into(), |report| words(&report.outcome));
                if share == Share::Whole {
                    whole.insert(*batch, nodes.grids);
                } else if let Some(whole) = whole.get(batch).filter(|whole| whole.len() == nodes.grids.len()) {
                    let other: Vec<_> = whole.iter().zip(&nodes.grids).filter(|(a, b)| a != b).collect();
                    let few: Vec<String> = other.iter().take(8).map(|(a, b)| format!("{a} became {b}")).collect();
                    note += &format!("; {} grids other than on the whole device {}", other.len(), few.join(", "));
                }
                Row::new(STEP, name, format!("{share:?}")).runs(*batch, 1, &mut spans).note(note).print();
            }
        }
    }
    Ok(())
}

fn rows(report: &GraphReport) -> Option<usize> {
    report.shapes.first().and_then(|shape| shape.first()).copied()
}

fn nodes(outcome: &GraphOutcome) -> Option<&GraphNodes> {
    match outcome {
        GraphOutcome::Recorded { nodes, .. } | GraphOutcome::Slower { nodes, .. } => Some(nodes),
        GraphOutcome::Refused { .. } => None,
    }
}

fn words(outcome: &GraphOutcome) -> String {
    let (what, nodes, plain, graph) = match outcome {
        GraphOutcome::Recorded { nodes, plain, graph } => ("a graph", nodes, plain, graph),
        GraphOutcome::Slower { nodes, plain, graph } => ("no graph, which is slower,", nodes, plain, graph),
        GraphOutcome::Refused { reason } => return format!("no graph: {reason}"),
    };
    let micros = |time: &downbeat_core::Duration| time.as_nanos() as f64 / 1e3;
    let GraphNodes { count, allocations, grids } = nodes;
    let (kernels, least, most) = (grids.len(), grids.iter().min().unwrap_or(&0), grids.iter().max().unwrap_or(&0));
    format!(
        "{what} of {count} nodes, {kernels} of them kernels of {least} to {most} blocks, {allocations} that take memory: {:.1} us, {:.1} us without",
        micros(graph),
        micros(plain)
    )
}
