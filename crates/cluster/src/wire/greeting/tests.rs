use downbeat_roles::{NodeId, Role};
use tokio::io::{DuplexStream, ReadHalf, WriteHalf, duplex};

use super::*;

/// How long an end waits. The time of these tests passes only while nothing else happens.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(2);
const FIRST: &str = "first-0123456789abcdefghijklmnopqrstuvwxyzABCDEFG";
const SECOND: &str = "second-0123456789abcdefghijklmnopqrstuvwxyzABCDEF";

fn secrets(lines: &[&str]) -> Secrets {
    if lines.is_empty() { Secrets::default() } else { Secrets::parse(&lines.join("\n")).unwrap() }
}

fn hello(name: &str) -> Hello {
    let (node, role) = (NodeId(1), Role::Scheduler { rank: 2 });
    Hello { protocol: PROTOCOL, node, role, name: name.to_owned(), address: "a:1".to_owned() }
}

/// The outcomes of a dialler and a listener with these secrets.
async fn met(dialler: &[&str], listener: &[&str]) -> [Result<Hello, WireError>; 2] {
    let (one, other) = duplex(4096);
    let (dialler, listener) = (secrets(dialler), secrets(listener));
    tokio::join!(meet(one, Side::Dialler, "d", &dialler), meet(other, Side::Listener, "l", &listener)).into()
}

/// The bytes of a good greeting, of the dialler and of the listener.
async fn recorded(lines: &[&str]) -> [Vec<u8>; 2] {
    let ((one, to_one), (other, to_other)) = (duplex(4096), duplex(4096));
    let known = secrets(lines);
    let (mut from_one, mut into_one) = tokio::io::split(to_one);
    let (mut from_other, mut into_other) = tokio::io::split(to_other);
    let (mut there, mut back) = (Vec::new(), Vec::new());
    let (dials, listens, (), ()) = tokio::join!(
        meet(one, Side::Dialler, "d", &known),
        meet(other, Side::Listener, "l", &known),
        record(&mut from_one, &mut into_other, &mut there),
        record(&mut from_other, &mut into_one, &mut back),
    );
    assert_eq!((dials.unwrap(), listens.unwrap()), (hello("l"), hello("d")));
    [there, back]
}

/// Carries bytes, and keeps them.
async fn record(from: &mut ReadHalf<DuplexStream>, to: &mut WriteHalf<DuplexStream>, said: &mut Vec<u8>) {
    while let Ok(byte) = from.read_u8().await {
        said.push(byte);
        if to.write_u8(byte).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown().await;
}

/// The outcome of an end that hears these bytes and then the end of the connection, and the bytes
/// that it says.
async fn hears(side: Side, bytes: &[u8], secrets: &Secrets) -> (Result<Hello, WireError>, Vec<u8>) {
    let mut said = Vec::new();
    let outcome = greet(&mut tokio::io::join(bytes, &mut said), side, &hello("x"), secrets).await;
    (outcome, said)
}

/// An end of a connection, which gives up after a time as a process does.
async fn meet(mut stream: DuplexStream, side: Side, name: &str, secrets: &Secrets) -> Result<Hello, WireError> {
    let late = |_| Err(WireError::Ended(std::io::ErrorKind::TimedOut.into()));
    tokio::time::timeout(PATIENCE, greet(&mut stream, side, &hello(name), secrets)).await.unwrap_or_else(late)
}

/// The outcomes of two ends, where byte `at` of one of them is changed on its way.
async fn changed(side: Side, at: usize) -> [Result<Hello, WireError>; 2] {
    let ((one, to_one), (other, to_other)) = (duplex(4096), duplex(4096));
    let known = secrets(&[FIRST]);
    let flip = |from: Side| (from == side).then_some(at);
    let (mut from_one, mut into_one) = tokio::io::split(to_one);
    let (mut from_other, mut into_other) = tokio::io::split(to_other);
    let (dials, listens, (), ()) = tokio::join!(
        meet(one, Side::Dialler, "d", &known),
        meet(other, Side::Listener, "l", &known),
        carry(&mut from_one, &mut into_other, flip(Side::Dialler)),
        carry(&mut from_other, &mut into_one, flip(Side::Listener)),
    );
    [dials, listens]
}

/// Carries bytes, and changes the byte `flips`.
async fn carry(from: &mut ReadHalf<DuplexStream>, to: &mut WriteHalf<DuplexStream>, flips: Option<usize>) {
    let mut place = 0;
    while let Ok(byte) = from.read_u8().await {
        let byte = if flips == Some(place) { byte ^ 0x10 } else { byte };
        place += 1;
        if to.write_u8(byte).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn ends_with_a_common_secret_meet_and_no_others() {
    for (dialler, listener) in [
        (&[][..], &[][..]),
        (&[FIRST], &[FIRST]),
        // The steps of a rotation: added behind, moved to the front, alone.
        (&[FIRST], &[FIRST, SECOND]),
        (&[FIRST, SECOND], &[FIRST]),
        (&[FIRST, SECOND], &[SECOND, FIRST]),
        (&[SECOND, FIRST], &[FIRST, SECOND]),
        (&[SECOND, FIRST], &[SECOND]),
        (&[SECOND], &[SECOND, FIRST]),
    ] {
        let [dials, listens] = met(dialler, listener).await;
        assert_eq!((dials.unwrap(), listens.unwrap()), (hello("l"), hello("d")), "{dialler:?} {listener:?}");
    }
    let [dials, listens] = met(&[SECOND], &[FIRST]).await;
    assert!(matches!((dials, listens), (Err(WireError::OtherSecret), Err(WireError::OtherSecret))));
    let [dials, listens] = met(&[SECOND, FIRST], &[FIRST]).await;
    assert!(matches!((dials, listens), (Err(WireError::OtherSecret), Err(WireError::OtherSecret))));
    let [dials, listens] = met(&[], &[FIRST]).await;
    assert!(matches!((dials, listens), (Err(WireError::NeedsSecret), Err(WireError::WithoutSecret))));
    let [dials, listens] = met(&[FIRST], &[]).await;
    assert!(matches!((dials, listens), (Err(WireError::WithoutSecret), Err(WireError::NeedsSecret))));
}

#[tokio::test(start_paused = true)]
async fn a_greeting_with_any_byte_changed_on_its_way_is_refused() {
    let [there, back] = recorded(&[FIRST]).await;
    for at in 0..there.len() {
        let [dials, listens] = changed(Side::Dialler, at).await;
        assert!(dials.is_err() && listens.is_err(), "byte {at} of the dialler: {dials:?}, {listens:?}");
    }
    // The listener has heard a good proof before its own introduction is changed.
    for at in 0..back.len() {
        let [dials, listens] = changed(Side::Listener, at).await;
        assert!(dials.is_err(), "byte {at} of the listener");
        assert!(listens.is_err() || at > OPENING - 1, "byte {at} of the listener's opening");
    }
}

#[tokio::test(start_paused = true)]
async fn a_greeting_that_is_cut_off_ends_the_connection() {
    for lines in [&[][..], &[FIRST]] {
        let [there, back] = recorded(lines).await;
        let known = secrets(lines);
        for end in 0..there.len() {
            let (outcome, _) = hears(Side::Listener, &there[..end], &known).await;
            assert!(matches!(outcome, Err(WireError::Ended(_))), "{end}: {outcome:?}");
        }
        for end in 0..back.len() {
            let (outcome, _) = hears(Side::Dialler, &back[..end], &known).await;
            assert!(matches!(outcome, Err(WireError::Ended(_))), "{end}: {outcome:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn recorded_greetings_prove_nothing_to_either_end() {
    let [there, back] = recorded(&[FIRST]).await;
    let known = secrets(&[FIRST]);
    let (outcome, said) = hears(Side::Listener, &there, &known).await;
    assert!(matches!(outcome, Err(WireError::OtherSecret)));
    assert_eq!(said.len(), OPENING + 1, "a stranger gets an opening and a refusal, and no proof");
    let (outcome, _) = hears(Side::Dialler, &back, &known).await;
    assert!(matches!(outcome, Err(WireError::OtherSecret)));
}

/// An attacker without the secret sends an end its own bytes back. The attacker also brings the
/// proof of one dialler to another dialler.
#[tokio::test(start_paused = true)]
async fn an_end_does_not_take_its_own_side_for_a_peer() {
    let known = secrets(&[FIRST]);
    let (mut end, mut attacker) = duplex(4096);
    let me = hello("d");
    let reflects = async {
        let mut opening = [0; OPENING];
        attacker.read_exact(&mut opening).await.unwrap();
        attacker.write_all(&opening).await.unwrap();
        let length = attacker.read_u16_le().await.unwrap();
        let mut rest = vec![0; usize::from(length) + PROOF];
        attacker.read_exact(&mut rest).await.unwrap();
        attacker.write_all(&[&[WELCOME][..], &length.to_le_bytes(), &rest].concat()).await.unwrap();
    };
    let (outcome, ()) = tokio::join!(greet(&mut end, Side::Dialler, &me, &known), reflects);
    assert!(matches!(outcome, Err(WireError::OtherSecret)), "{outcome:?}");

    // Two diallers, and the attacker between them.
    let ((one, to_one), (other, to_other)) = (duplex(4096), duplex(4096));
    let (mut from_one, mut into_one) = tokio::io::split(to_one);
    let (mut from_other, mut into_other) = tokio::io::split(to_other);
    let (a, b, (), ()) = tokio::join!(
        meet(one, Side::Dialler, "1", &known),
        meet(other, Side::Dialler, "2", &known),
        carry(&mut from_one, &mut into_other, None),
        carry(&mut from_other, &mut into_one, None),
    );
    assert!(a.is_err() && b.is_err());
}

/// The attacker gives one nonce to many ends, and uses their proofs again.
#[tokio::test(start_paused = true)]
async fn an_attacker_who_repeats_a_nonce_gains_nothing() {
    let known = secrets(&[FIRST]);
    let [there, _] = recorded(&[FIRST]).await;
    for _ in 0..3 {
        // The opening of a good dialler, with its nonce; then its proof for another listener.
        let (outcome, said) = hears(Side::Listener, &there, &known).await;
        assert!(matches!(outcome, Err(WireError::OtherSecret)));
        let (_, again) = hears(Side::Listener, &there, &known).await;
        assert_ne!(said[..OPENING], again[..OPENING], "the listener's nonce is fresh each time");
    }
    let mut nonces = Vec::new();
    for _ in 0..100 {
        nonces.push(opening(&known).unwrap());
    }
    nonces.sort_unstable();
    nonces.dedup();
    assert_eq!(nonces.len(), 100);
}

#[tokio::test(start_paused = true)]
async fn strangers_are_told_apart_and_nothing_is_held_for_what_they_announce() {
    let known = secrets(&[FIRST]);
    let (outcome, said) = hears(Side::Listener, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", &known).await;
    assert!(matches!(outcome, Err(WireError::Foreign)) && said.is_empty(), "nothing is told to other programs");
    let [there, back] = recorded(&[]).await;
    let mut other = there.clone();
    other[MAGIC.len()] = 0xee;
    let (outcome, said) = hears(Side::Listener, &other[..VERSIONED], &secrets(&[])).await;
    assert!(matches!(outcome, Err(WireError::Protocol(0xee))));
    assert_eq!(said[MAGIC.len()..VERSIONED], PROTOCOL.to_le_bytes(), "it hears which version is spoken here");
    for (side, bytes, begin) in [(Side::Listener, &there, OPENING), (Side::Dialler, &back, OPENING + 1)] {
        let mut large = bytes.clone();
        large[begin..begin + 2].copy_from_slice(&1025u16.to_le_bytes());
        let (outcome, _) = hears(side, &large, &secrets(&[])).await;
        assert!(matches!(outcome, Err(WireError::TooLarge { announced: 1025, most: 1024 })));
        let mut garbled = bytes.clone();
        garbled[begin + 2..].fill(0xff);
        let (outcome, _) = hears(side, &garbled, &secrets(&[])).await;
        assert!(matches!(outcome, Err(WireError::Garbled(_))));
    }
    let mut trust = there.clone();
    trust[TRUST] = 2;
    let (outcome, _) = hears(Side::Listener, &trust, &secrets(&[])).await;
    assert!(matches!(outcome, Err(WireError::Foreign)));
    let long = Hello { name: "x".repeat(2000), ..hello("") };
    let mut nowhere = tokio::io::join(&back[..], tokio::io::sink());
    let outcome = greet(&mut nowhere, Side::Dialler, &long, &secrets(&[])).await;
    assert!(matches!(outcome, Err(WireError::TooLarge { .. })), "an own name that is too long is an error");
    let strange = Hello { name: "a\nb".to_owned(), ..hello("") };
    let (mut one, two) = duplex(4096);
    let none = secrets(&[]);
    let strange = tokio::time::timeout(PATIENCE, greet(&mut one, Side::Dialler, &strange, &none));
    let (_, outcome) = tokio::join!(strange, meet(two, Side::Listener, "l", &none));
    assert!(matches!(outcome, Err(WireError::Foreign)), "a name with control characters is refused");
}
