use downbeat_core::Duration;
use downbeat_core::ids::BatchId;
use downbeat_host::request::batch_codec::OutputPart;
use downbeat_roles::{BatchKey, Epoch, NodeId};

use super::*;
use crate::wire::arena::tests::both;
use crate::wire::peer_memory::PeerMemory;

fn tensors_of(sizes: &[usize]) -> Tensors {
    let part = |(place, size): (usize, &usize)| OutputPart {
        shape: vec![1, *size as i64],
        data: vec![place as u8 + 1; *size].into(),
    };
    sizes.iter().enumerate().map(part).collect()
}

fn frame(messages: Vec<Message<Tensors>>) -> Frame<Tensors> {
    let (sent, echo) = (Duration::from_millis(3), Some((Duration::from_millis(2), Duration::from_millis(1))));
    Frame { from: NodeId(7), session: 1, of: 2, first: 40, messages, ack: 9, sent, echo }
}

fn inputs(payloads: Vec<Tensors>) -> Message<Tensors> {
    let batch = BatchKey { epoch: Epoch { number: 3, rank: 1 }, batch: BatchId(5) };
    let granted = (0..).zip(payloads).map(|(number, payload)| (number, Duration::MAX, payload)).collect();
    Message::Inputs { batch, granted, gone: vec![9] }
}

/// The outbox's bytes, written in pieces of at most `most` bytes.
fn written(outbox: &mut Outbox, most: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let all = outbox.write(|pieces| {
        let before = bytes.len();
        for piece in pieces {
            let room = most - (bytes.len() - before);
            bytes.extend_from_slice(&piece[..piece.len().min(room)]);
        }
        Ok(bytes.len() - before)
    });
    assert!(all.unwrap());
    bytes
}

async fn read(bytes: &[u8], most: u64) -> Result<Frame<Tensors>, WireError> {
    read_frame(&mut &bytes[..], &mut Vec::new(), most, None).await.map(Option::unwrap)
}

#[tokio::test]
async fn frames_come_as_they_were_sent_however_they_are_written() {
    let failed = Outcome::Failed { code: 3, message: "no".to_owned() };
    let answers = Message::Answers(vec![(1, failed), (2, Outcome::Outputs(tensors_of(&[0, 100_000])))]);
    let sent = [frame(vec![inputs(vec![tensors_of(&[3, 5000]), tensors_of(&[])]), answers]), frame(Vec::new())];
    for most in [1, 100, 1 << 20] {
        let mut outbox = Outbox::default();
        for frame in &sent {
            outbox.put_frame(frame, None).unwrap();
        }
        let announced = outbox.bytes();
        let bytes = written(&mut outbox, most);
        assert_eq!((bytes.len(), outbox.bytes()), (announced, 0));
        let mut reader = &bytes[..];
        let mut scratch = Vec::new();
        for frame in &sent {
            assert_eq!(&read_frame(&mut reader, &mut scratch, 1 << 20, None).await.unwrap().unwrap(), frame);
        }
        assert!(matches!(read_frame(&mut reader, &mut scratch, 1 << 20, None).await, Err(WireError::Ended(_))));
    }
}

#[tokio::test]
async fn what_is_too_large_or_cut_off_is_refused_before_it_is_held() {
    let mut outbox = Outbox::default();
    outbox.put_frame(&frame(vec![inputs(vec![tensors_of(&[5000, 6000])])]), None).unwrap();
    let bytes = written(&mut outbox, 1 << 20);
    assert!(matches!(read(&bytes, 10_999).await, Err(WireError::TooLarge { announced: 11_000, most: 10_999 })));
    assert!(read(&bytes, 11_000).await.is_ok());
    for end in [0, 3, 4, 20, bytes.len() - 1] {
        assert!(matches!(read(&bytes[..end], 11_000).await, Err(WireError::Ended(_))), "{end}");
    }
    let head = u32::MAX.to_le_bytes();
    assert!(matches!(read(&head, 11_000).await, Err(WireError::TooLarge { announced: 4_294_967_295, .. })));
    let garbage = [&8u32.to_le_bytes()[..], &[0xff; 8]].concat();
    assert!(matches!(read(&garbage, 11_000).await, Err(WireError::Garbled(_))));
}

#[tokio::test]
async fn large_tensors_go_by_memory_and_frames_without_them_are_lost() {
    let (arena, peer) = both();
    let peer = PeerMemory::Mapped(peer);
    let (kept, elsewhere) = (Tensors::kept(tensors_of(&[100, 8000]), Some(&arena)), tensors_of(&[5000]));
    let sent = [frame(vec![inputs(vec![kept.clone(), elsewhere])]), frame(Vec::new())];
    let mut outbox = Outbox::default();
    assert_eq!(outbox.put_frame(&sent[0], Some(&arena)).unwrap(), [5100, 8000]);
    assert_eq!(outbox.put_frame(&sent[1], Some(&arena)).unwrap(), [0, 0]);
    let announced = outbox.bytes();
    let bytes = written(&mut outbox, 1 << 20);
    assert!(bytes.len() == announced && announced < 6000, "{announced}");
    let mut scratch = Vec::new();
    let mut read = async |most| {
        let mut reader = &bytes[..];
        let first = read_frame(&mut reader, &mut scratch, most, Some(&peer)).await;
        (first, read_frame(&mut reader, &mut scratch, most, Some(&peer)).await.ok().flatten())
    };
    let (first, second) = read(1 << 20).await;
    assert_eq!((first.unwrap().as_ref(), second.as_ref()), (Some(&sent[0]), Some(&sent[1])));
    assert!(matches!(read(13_000).await.0, Err(WireError::TooLarge { announced: 13_100, .. })), "memory counts");
    drop((kept, sent));
    let (first, second) = read(1 << 20).await;
    assert!(first.unwrap().is_none() && second.is_some(), "what comes after it is read");
}

#[tokio::test]
async fn a_tensor_beyond_the_memory_of_a_peer_ends_its_connection() {
    let (arena, peer) = both();
    let peer = PeerMemory::Mapped(peer);
    let kept = Tensors::kept(tensors_of(&[8000]), Some(&arena));
    let mut outbox = Outbox::default();
    outbox.put_frame(&frame(vec![inputs(vec![kept])]), Some(&arena)).unwrap();
    let mut bytes = written(&mut outbox, 1 << 20);
    let page = bytes.len() - 12;
    for beyond in [15, 16, u32::MAX] {
        bytes[page..page + 4].copy_from_slice(&beyond.to_le_bytes());
        let read = read_frame(&mut &bytes[..], &mut Vec::new(), 1 << 20, Some(&peer)).await;
        assert!(matches!(read, Err(WireError::Outside(8000))), "{beyond}");
    }
}
