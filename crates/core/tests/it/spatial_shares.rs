//! The shares of models on the partitions of a device.

use std::collections::BTreeMap;

use downbeat_core::device::spatial::{
    BatchControl, MakeBatchControl, ShareOutput, SharePart, ShareParts, Shares, SharingModel, Slab, Worked,
};
use downbeat_core::device::{PartitionId, Span};
use downbeat_core::{Duration, ModelId, Time};

const A: ModelId = ModelId(0);
const B: ModelId = ModelId(1);
const HOLD_DOWN: Duration = Duration::from_millis(100);

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

/// Partitions of two units, of one and one of these, and of one more.
fn shares(by_hand: &[(&str, u32)], control: Option<MakeBatchControl>) -> Shares {
    let part = |cores: &[usize]| SharePart { units: cores.len() as u32, cores: Some(cores.iter().copied().collect()) };
    let parts = ShareParts::new([&[0, 1][..], &[0], &[1], &[2]].map(part).to_vec());
    let by_hand = by_hand.iter().map(|(name, to)| ((*name).to_owned(), PartitionId(*to)));
    Shares::new(parts, (HOLD_DOWN, Duration::from_millis(1_000)), control, by_hand.collect::<BTreeMap<_, _>>())
}

fn model(name: &str, knee: u32) -> SharingModel {
    let (name, partition, worked) = (name.to_owned(), PartitionId(0), Worked::default());
    SharingModel { name, partition, slo: None, knee: Some(knee), batch: None, worked }
}

/// Takes all decisions, and makes the lanes of each partition except `broken`. Returns the
/// decisions as short texts.
fn decided(shares: &mut Shares, ms: u64, broken: Option<u32>) -> Vec<String> {
    let mut said = Vec::new();
    while let Some(output) = shares.poll_output(at(ms)) {
        match output {
            ShareOutput::Prepare { model, partition, share } => {
                said.push(format!("prepare {} in {}, {:?}", model.0, partition.0, share.map(|(units, _)| units)));
                let made = if broken == Some(partition.0) { Err("no memory".to_owned()) } else { Ok(()) };
                shares.handle_prepared(at(ms), model, made);
            }
            ShareOutput::Switch { model, partition, .. } => said.push(format!("{} to {}", model.0, partition.0)),
            ShareOutput::Moved { model, outcome } => said.push(format!("moved {}: {outcome:?}", model.0)),
            ShareOutput::NoRoom { model } => said.push(format!("no room for {}", model.0)),
            ShareOutput::Discard { model } => said.push(format!("discard {}", model.0)),
            ShareOutput::Refused { model, .. } => said.push(format!("refused {}", model.0)),
        }
    }
    said
}

#[test]
fn models_get_partitions_that_have_little_in_common() {
    let mut shares = shares(&[], None);
    shares.handle_model(at(0), A, Some(model("a", 2)));
    shares.handle_model(at(0), B, Some(model("b", 1)));
    let said = decided(&mut shares, 0, None);
    let places = |id: ModelId| said.iter().rfind(|text| text.starts_with(&format!("{} to ", id.0))).cloned();
    assert_eq!((places(A), places(B)), (Some("0 to 0".to_owned()), Some("1 to 3".to_owned())), "{said:?}");
    assert_eq!((shares.view(A).unwrap().units, shares.view(B).unwrap().units), (2, 1));
}

#[test]
fn a_move_that_fails_leaves_the_model_to_its_device() {
    let mut shares = shares(&[], None);
    shares.handle_model(at(0), A, Some(model("a", 3)));
    decided(&mut shares, 0, None);
    shares.handle_choice(at(1), "a", Some(PartitionId(3))).unwrap();
    let said = decided(&mut shares, 1, Some(3));
    assert!(said.iter().any(|text| text.contains("partition 3 cannot be made ready: no memory")), "{said:?}");
    assert!(!shares.is_by_hand("a"), "the model is left to the device again");
    let place = |shares: &mut Shares, ms| {
        shares.handle_look();
        decided(shares, ms, Some(3))
    };
    assert_eq!(place(&mut shares, 50), [""; 0], "held down");
    assert_eq!((shares.view(A).unwrap().preparing, shares.view(A).unwrap().units), (None, 3));
}

#[test]
fn a_model_stays_where_the_user_put_it() {
    let mut shares = shares(&[("a", 3)], None);
    shares.handle_model(at(0), A, Some(model("a", 2)));
    let said = decided(&mut shares, 0, None);
    assert!(said.contains(&"0 to 3".to_owned()), "{said:?}");
    // The second model gets the other partitions, and the first stays.
    shares.handle_model(at(1), B, Some(model("b", 2)));
    let said = decided(&mut shares, 1, None);
    assert!(said.iter().all(|text| !text.starts_with("0 to ")), "{said:?}");
    assert_eq!(shares.view(A).unwrap().units, 1);
    let unknown = shares.handle_choice(at(2), "c", Some(PartitionId(0))).unwrap_err();
    assert!(unknown.contains("no share of the device yet"), "{unknown}");
    assert_eq!(shares.handle_choice(at(2), "a", Some(PartitionId(3))), Ok(vec![A]));
    assert_eq!(decided(&mut shares, 2, None), ["moved 0: Ok(())"], "it is there already");
}

#[test]
fn models_beyond_the_steps_of_the_device_wait_for_room() {
    let mut shares = shares(&[], None);
    for id in 0..4 {
        shares.handle_model(at(0), ModelId(id), Some(model("m", 1)));
    }
    let said = decided(&mut shares, 0, None);
    assert_eq!(said.iter().filter(|text| text.starts_with("no room")).count(), 1, "told once: {said:?}");
    assert!(shares.view(ModelId(3)).unwrap().has_no_room);
    shares.handle_model(at(200), A, None);
    decided(&mut shares, 200, None);
    assert!(!shares.view(ModelId(3)).unwrap().has_no_room, "a model has gone");
}

#[test]
fn section_3_3_1_half_of_the_slo_is_for_waiting() {
    let mut shares = shares(&[], Some(|slo, most| BatchControl::Slab(Slab::new(slo, most))));
    assert!(shares.batch_control(None, 8).is_none(), "without an SLO, the device policy decides");
    let slo = Some(Duration::from_millis(100));
    let batch = shares.batch_control(slo, 8);
    shares.handle_model(at(0), A, Some(SharingModel { slo, batch, ..model("a", 2) }));
    decided(&mut shares, 0, None);
    let run = |shares: &mut Shares, ms: u64, took: u64| {
        let rows = shares.view(A).unwrap().batch_limit.unwrap();
        let span = Span { start: at(ms), end: at(ms + took) };
        shares.handle_batch(at(ms + took), A, rows, span);
        while shares.poll_limit().is_some() {}
        shares.view(A).unwrap().batch_limit.unwrap()
    };
    assert_eq!(shares.view(A).unwrap().batch_limit, Some(1));
    let grown = (1..20).map(|time| run(&mut shares, time * 10, 5)).last().unwrap();
    assert_eq!(grown, 8, "batches were in time");
    let shrunk = (20..30).map(|time| run(&mut shares, time * 100, 60)).last().unwrap();
    assert!(shrunk < 8, "60 ms are more than half of 100 ms: {shrunk}");
}
