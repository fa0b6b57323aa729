//! Checks of any log of any machine.

use downbeat_core::journal::*;

/// Checks that the log is read as it was written and replays alike. Checks the same for a part of
/// the log, and that damage does no harm.
///
/// The entries go to a fresh machine, and its journal must write the same bytes: so reading loses
/// nothing.
pub fn check<M: Machine>(fresh: M, log: &[u8]) {
    let entries = entries::<M::Records>(log);
    let inputs = entries.iter().filter(|entry| matches!(entry.record, Record::Input(..))).count();
    let replayed = replay(log).unwrap();
    assert_eq!(replayed.divergence, None);
    assert_eq!((replayed.inputs, replayed.decisions), (inputs as u64, (entries.len() - inputs) as u64));
    let again = written_again(fresh, &entries);
    assert_eq!(self::entries::<M::Records>(&again), entries, "what is read is what was written");
    if has_one_block(log) {
        assert_eq!(again, log, "what is read is what was written");
    }
    shown(log, entries.len() + 1);
    let mut random = log.len() as u64 + 1;
    let mut draw = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    // The last entries: the earlier ones are the same in other logs.
    let length = log.len() - draw(log.len().min(60));
    let (cut, is_whole) = (&log[..length], length >= header(log));
    assert_eq!(is_whole, read::<M::Records>(cut).is_ok(), "{length} of {} bytes", log.len());
    if is_whole {
        let read = self::entries::<M::Records>(cut);
        assert_eq!(read[..], entries[..read.len()], "up to the last whole entry");
        assert_eq!(replay(cut).unwrap().divergence, None, "{length} of {} bytes", log.len());
    }
    let mut damaged = log.to_vec();
    for _ in 0..=draw(4) {
        damaged[draw(log.len())] = draw(256) as u8;
    }
    does_no_harm(&damaged);
}

/// The bytes before the first entry.
fn header(log: &[u8]) -> usize {
    (0..).find(|length| show(&log[..*length], Form::Text).is_ok()).unwrap()
}

/// Whether a log was taken at one time.
fn has_one_block(log: &[u8]) -> bool {
    let block = &log[header(log)..];
    BlockHead::read(block).is_some_and(|head| head.length as usize + BlockHead::LENGTH == block.len())
}

/// A log of these pieces: its header, and entries for one block.
pub fn joined(pieces: &[&[u8]]) -> Vec<u8> {
    let entries = pieces[1..].concat();
    let length = (entries.len() as u32).to_le_bytes();
    [pieces[0], &[0x43], &length, &[0; 16], &entries].concat()
}

/// The entries of a log, which is whole.
pub fn entries<R: Records>(log: &[u8]) -> Vec<Entry<R>> {
    read(log).unwrap().1.map(Result::unwrap).collect()
}

/// The log that a machine writes with the inputs of these entries, and as many decisions.
fn written_again<M: Machine>(fresh: M, entries: &[Entry<M::Records>]) -> Vec<u8> {
    let mut journal = Journal::on(fresh);
    for entry in entries {
        match &entry.record {
            Record::Input(at, input) => drop(journal.apply(*at, input.clone())),
            Record::Refused(_) => {}
            Record::Decision(_) => assert!(journal.poll().is_some()),
        }
    }
    let mut log = Vec::new();
    journal.take_log(&mut log);
    log
}

/// Checks that every entry has a text, and an object with its time and one fact.
fn shown(log: &[u8], lines: usize) {
    assert_eq!(show(log, Form::Text).unwrap().filter(|line| !line.as_ref().unwrap().is_empty()).count(), lines);
    let objects: Vec<serde_json::Value> =
        show(log, Form::Json).unwrap().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    assert_eq!(objects.len(), lines);
    assert!(objects[0]["begin"].is_string(), "{}", objects[0]);
    for object in &objects[1..] {
        let facts = ["told", "refused", "decision"].iter().filter(|key| !object[**key].is_null()).count();
        assert!(object["at"].is_u64() && facts == 1, "{object}");
    }
}

/// Reading and replaying end in an answer for every content of a file.
pub fn does_no_harm(log: &[u8]) {
    for form in [Form::Text, Form::Json] {
        if let Ok(lines) = show(log, form) {
            lines.map_while(Result::ok).for_each(|line| assert!(!line.is_empty()));
        }
    }
    let _ = replay(log);
}

/// The journal's whole log.
pub fn taken<M: Machine>(mut journal: Journal<M>) -> Vec<u8> {
    let mut log = Vec::new();
    journal.take_log(&mut log);
    log
}
