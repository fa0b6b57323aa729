//! Pictures, whole and damaged.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use downbeat_preprocess::{PictureFormat, PictureHeader, decode};
use downbeat_protocol::pace;
use proptest::prelude::*;
use serde_json::json;

use super::*;

/// A PNG of 8 or 16 bits a sample.
fn png(width: u32, height: u32, color: png::ColorType, depth: png::BitDepth, samples: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(color);
    encoder.set_depth(depth);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(samples).unwrap();
    writer.finish().unwrap();
    file
}

fn rgb(width: u32, height: u32, samples: &[u8]) -> Vec<u8> {
    png(width, height, png::ColorType::Rgb, png::BitDepth::Eight, samples)
}

fn photo() -> Vec<u8> {
    std::fs::read(Path::new(EXAMPLES).join("photo.jpg")).unwrap()
}

fn as_it_is() -> Pipeline {
    pipeline(&json!([{ "step": "decode" }]), &[spec("x", DataType::Uint8, &[-1, -1, -1, 3])]).unwrap()
}

fn error(pipeline: &Pipeline, item: &[u8]) -> String {
    run(pipeline, &[item]).unwrap_err().to_string()
}

#[test]
fn pixels_come_in_the_order_that_is_asked_for() {
    let file = rgb(2, 1, &[10, 20, 30, 40, 50, 60]);
    let of = |color: &str, order: &str, dims: &[i64]| {
        let steps = json!([{ "step": "decode", "color": color }, { "step": "layout", "order": order }]);
        let made = run(&pipeline(&steps, &[spec("x", DataType::Uint8, dims)]).unwrap(), &[&file]).unwrap();
        (made[0].shape.clone(), made[0].data.to_vec())
    };
    assert_eq!(of("rgb", "hwc", &[-1, -1, -1, 3]), (vec![1, 1, 2, 3], vec![10, 20, 30, 40, 50, 60]));
    assert_eq!(of("rgb", "chw", &[-1, 3, -1, -1]), (vec![1, 3, 1, 2], vec![10, 40, 20, 50, 30, 60]));
    assert_eq!(of("bgr", "hwc", &[-1, -1, -1, 3]), (vec![1, 1, 2, 3], vec![30, 20, 10, 60, 50, 40]));
    assert_eq!(of("bgr", "chw", &[-1, 3, -1, -1]), (vec![1, 3, 1, 2], vec![30, 60, 20, 50, 10, 40]));
    assert_eq!(of("gray", "hw", &[-1, -1, -1]), (vec![1, 1, 2], vec![18, 48]));
}

#[test]
fn normalised_is_scaled_less_the_mean_by_the_deviation() {
    let steps = json!([
        { "step": "decode" },
        { "step": "normalize", "mean": [0.5, 0.25, 0.0], "std": [0.5, 0.25, 2.0] },
    ]);
    let made = run(
        &pipeline(&steps, &[spec("x", DataType::Fp32, &[-1, -1, -1, 3])]).unwrap(),
        &[&rgb(1, 1, &[255, 0, 51]), &rgb(1, 1, &[0, 255, 255])],
    );
    let made = made.unwrap();
    assert_eq!(made[0].shape, [2, 1, 1, 3]);
    assert_eq!(floats(&made[0]), [1.0, -1.0, 0.1, -1.0, 3.0, 0.5]);
}

#[test]
fn a_single_size_is_the_shorter_side_and_crops_are_central() {
    // 320 x 240 becomes 53 x 40: 53.3 is cut to whole pixels, as torchvision does.
    let steps = json!([{ "step": "decode" }, { "step": "resize", "size": 40 }]);
    let x = spec("x", DataType::Uint8, &[-1, -1, -1, 3]);
    assert_eq!(
        run(&pipeline(&steps, std::slice::from_ref(&x)).unwrap(), &[&photo()]).unwrap()[0].shape,
        [1, 40, 53, 3]
    );
    let steps = json!([{ "step": "decode", "color": "gray" }, { "step": "crop", "size": [1, 2] }, { "step": "layout", "order": "hw" }]);
    let x = spec("x", DataType::Uint8, &[-1, 1, 2]);
    let row = png(5, 1, png::ColorType::Grayscale, png::BitDepth::Eight, &[0, 1, 2, 3, 4]);
    // Halves are rounded to even: 1.5 becomes 2.
    assert_eq!(run(&pipeline(&steps, &[x]).unwrap(), &[&row]).unwrap()[0].data.to_vec(), [2, 3]);
}

#[test]
fn transparency_is_left_out_16_bits_are_cut_to_8_and_gray_becomes_colours() {
    use png::{BitDepth, ColorType};
    for (file, pixel) in [
        (png(1, 1, ColorType::Rgba, BitDepth::Eight, &[1, 2, 3, 0]), [1, 2, 3]),
        (png(1, 1, ColorType::GrayscaleAlpha, BitDepth::Eight, &[7, 9]), [7, 7, 7]),
        (png(1, 1, ColorType::Grayscale, BitDepth::Sixteen, &[200, 255]), [200, 200, 200]),
        (png(1, 1, ColorType::Rgb, BitDepth::Sixteen, &[1, 9, 2, 9, 3, 9]), [1, 2, 3]),
    ] {
        assert_eq!(run(&as_it_is(), &[&file]).unwrap()[0].data.to_vec(), pixel);
    }
}

#[test]
fn a_bomb_is_refused_by_its_header() {
    // The file has no row of so large a picture.
    let mut huge = rgb(1, 1, &[0; 3]);
    huge[16..24].copy_from_slice(&[100_000_u32.to_be_bytes(), 100_000_u32.to_be_bytes()].concat());
    let said = error(&as_it_is(), &huge);
    assert!(said.contains("100000 x 100000") && said.contains("max_megapixels"), "{said}");
    let mut huge = photo();
    let frame = huge.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    huge[frame + 5..frame + 9].fill(0xff);
    let said = error(&as_it_is(), &huge);
    assert!(said.contains("65535 x 65535") && said.contains("at most 1000000"), "{said}");
    // A picture that is small in the file, and too large once its shorter side is 256.
    let steps = json!([{ "step": "decode" }, { "step": "resize", "size": 256 }]);
    let thin = rgb(30_000, 1, &[0; 90_000]);
    let said = error(&pipeline(&steps, &[spec("x", DataType::Uint8, &[-1, -1, -1, 3])]).unwrap(), &thin);
    assert!(said.contains("the resized picture would have 7680000 x 256"), "{said}");
}

#[test]
fn what_is_damaged_or_no_picture_says_so() {
    let photo = photo();
    for cut in [3, 20, photo.len() / 2, photo.len() - 40] {
        let said = error(&as_it_is(), &photo[..cut]);
        assert!(said.starts_with("item 0 of input 'image': the picture "), "{cut}: {said}");
    }
    let png = rgb(2, 2, &[9; 12]);
    for cut in [9, 30, png.len() - 20] {
        assert!(error(&as_it_is(), &png[..cut]).contains("PNG"), "{cut}");
    }
    assert!(error(&as_it_is(), b"").contains("the picture is empty"));
    assert!(error(&as_it_is(), b"GIF89a").contains("neither a JPEG nor a PNG"));
    assert!(run(&as_it_is(), &[]).unwrap_err().to_string().contains("no items"));
}

#[test]
fn pictures_of_a_request_have_one_size() {
    let said = run(&as_it_is(), &[&rgb(1, 1, &[0; 3]), &rgb(2, 1, &[0; 6])]).unwrap_err().to_string();
    assert!(said.starts_with("item 1 of input 'image'") && said.contains("resize"), "{said}");
}

#[test]
fn a_large_picture_is_decoded_in_steps_that_can_end_it() {
    struct Ended;
    let items = [Bytes::from(rgb(1000, 900, &[7; 2_700_000]))];
    let all = Rc::new(Cell::new(0));
    let counted = all.clone();
    pace::with(move |_| counted.set(counted.get() + 1), || as_it_is().run(&items)).unwrap();
    assert!(all.get() > 900, "a step for each row");
    let steps = Rc::new(Cell::new(0));
    let counted = steps.clone();
    let end = move |_| {
        counted.set(counted.get() + 1);
        if counted.get() == 5 {
            std::panic::resume_unwind(Box::new(Ended));
        }
    };
    let pipeline = as_it_is();
    let ended = catch_unwind(AssertUnwindSafe(|| pace::with(end, || pipeline.run(&items))));
    assert!(ended.is_err_and(|payload| payload.is::<Ended>()));
    assert_eq!(steps.get(), 5);
}

#[test]
fn a_file_too_short_for_its_pixels_is_refused_before_decoding() {
    let mut long = rgb(1, 1, &[0; 3]);
    long[16..24].copy_from_slice(&[900_u32.to_be_bytes(), 900_u32.to_be_bytes()].concat());
    let said = as_it_is().look(&[Bytes::from(long)]).unwrap_err().to_string();
    assert!(said.contains("900 x 900") && said.contains("bytes"), "{said}");
}

proptest! {
    #[test]
    fn a_picture_that_is_decoded_has_the_size_that_its_header_says(
        place in 0_usize..5_000, value: u8, cut in 0_usize..6_000,
    ) {
        let mut file = photo();
        if let Some(byte) = file.get_mut(place) {
            *byte = value;
        }
        file.truncate(cut.max(200));
        if let Ok(header) = PictureHeader::read(&file)
            && header.pixels() <= MOST_PIXELS
            && let Ok(picture) = decode(&file, header, 3)
        {
            prop_assert_eq!((picture.width, picture.height), (header.width, header.height));
            prop_assert_eq!(picture.samples.len() as u64, header.pixels() * 3);
            prop_assert!(header.format != PictureFormat::Png);
        }
    }
}
