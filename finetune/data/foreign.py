"""What a file is that is not a table, and how its program exports one."""

import re
from zipfile import BadZipFile, ZipFile

from finetune.data.packed import ZIP, Content
from finetune.errors import DataUnreadableError

START_BYTES = 4096
SAVE = "save the table as .csv, .xlsx, .jsonl or .parquet"
DOWNLOAD = "download the file itself, not the page that shows it"
UNPACK = "unpack it and name the table in it"
PANDAS = "in Python: pandas.read_{}('FILE').to_parquet('table.parquet')"
NUMBERS = "open it in Numbers and choose File > Export To > CSV"
PAGES = "open it in Pages and choose File > Export To > Plain Text, or copy the table to Numbers"
WORD = "copy the table to Excel or Numbers and save it as .csv"
TEXT_EDIT = "open it in TextEdit, choose Format > Make Plain Text, and save it as .csv"
SPSS = "in SPSS, choose File > Save As > CSV, or " + PANDAS.format("spss")
STATA = "in Stata: export delimited table.csv, or " + PANDAS.format("stata")
R = 'in R: write.csv(readRDS("FILE"), "table.csv", row.names = FALSE)'
SAS = "in SAS: proc export, or " + PANDAS.format("sas")
SQLITE = "export it: sqlite3 -header -csv FILE 'select * from TABLE' > table.csv"
SHEETS = "open it in Google Sheets and choose File > Download > Comma-separated values"
YAML = "write its rows as JSON Lines; a configuration is named by --config"
EXCEL = "open it in Excel or Numbers and save it as .xlsx or .csv"
# By how a file begins.
BEGINNINGS = {
    rb"SQLite format 3": ("an SQLite database", SQLITE),
    rb"\$FL[23]": ("an SPSS file", SPSS),
    rb"(<stata_dta>|[\x6e-\x73][\x01\x02]\x01\x00)": ("a Stata file", STATA),
    rb"\x00{12}\xc2\xea\x81\x60|HEADER RECORD\*{7}": ("a SAS file", SAS),
    rb"RD[AX][23]\n|[XA]\n\x00\x00\x00[\x02\x03]": ("a file of R", R),
    rb"\{\\rtf": ("a rich-text document (RTF), as TextEdit writes it by default", TEXT_EDIT),
    rb"\x00\x01\x00\x00Standard (Jet|ACE) DB": ("an Access database", "export the table as .csv"),
    rb"ARROW1|FEA1": ("an Arrow or Feather file", PANDAS.format("feather")),
    rb"ORC": ("an ORC file", PANDAS.format("orc")),
    rb"\x89HDF": ("an HDF5 file", PANDAS.format("hdf")),
    rb"Obj\x01|\x93NUMPY": ("an Avro or NumPy file", SAVE),
    rb"\x28\xb5\x2f\xfd": ("compressed with zstd", UNPACK),
    rb"7z\xbc\xaf|Rar!|(?s:.{257}ustar)": ("a 7z, RAR or tar archive", UNPACK),
    rb"\x89PNG|\xff\xd8\xff|GIF8": ("a picture", SAVE),
    rb"\x80[\x02-\x05]": ("a pickle, which can run code and is not read", SAVE),
    rb"%PDF": ("a PDF document", SAVE),
    rb"\s*(<\?xml[^>]*>\s*)?(<\?mso-application[^>]*Excel|<Workbook\b)": (
        "an XML spreadsheet of Excel 2003",
        EXCEL,
    ),
    rb"bplist00": ("a web archive or property list of macOS", "name the file that it points to"),
    rb"(?i)(\s|%.*\n)*@relation\s": ("an ARFF file of Weka", "in Weka, save it as .csv"),
    rb'\s*\{[^{}]*"(doc_id|url)"\s*:[^{}]*(docs\.google|resource_key|"email")': (
        "a link to a Google sheet, and not the sheet",
        SHEETS,
    ),
    rb"(?s)(?=.{0,300000}<table)(\xef\xbb\xbf)?\s*<(!doctype html|html|head|body|meta|style|table)"
    rb"(?i:\b)": ("a web page with a table, whatever its suffix", EXCEL),
    rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype html|html|head|body|!--)": (
        "an HTML page, and not a table",
        DOWNLOAD,
    ),
    rb"(\xef\xbb\xbf)?\s*<(\?xml|Error|\w+ xmlns)": (
        "XML, maybe a server's error message",
        DOWNLOAD,
    ),
    rb"[45]\d\d: [A-Z]|(?i:access denied|(entry |file )?not found|forbidden)\W*$": (
        "a server's error message",
        DOWNLOAD,
    ),
    # One object, with nothing behind it.
    rb'(?s)(?=.{0,500}$)\s*\{(?!.*\}[\s,]*\{)\s*("message":[^{}]*)?'
    rb'"(error|errors|detail|status|documentation_url)":.*\}\s*$': (
        "a server's error message",
        DOWNLOAD,
    ),
    rb"version https://git-lfs": (
        "a pointer of Git LFS to a file that is elsewhere",
        "fetch the file with git lfs pull",
    ),
    rb"(?s).{0,3000}?\n[ |:+-]*(-[ |:+-]*[|+]|[|+][ |:+-]*-)[ |:+-]*\r?\n": (
        "a table drawn with bars and dashes, as in Markdown",
        SAVE,
    ),
}
# By suffix, where the files of several programs begin alike.
DOCUMENTS = {
    ".numbers": ("a spreadsheet of Numbers", NUMBERS),
    ".pages": ("a document of Pages", PAGES),
    ".key": ("a presentation of Keynote", SAVE),
    ".docx": ("a document of Word", WORD),
    ".doc": ("a document of Word", WORD),
    ".odt": ("a document of LibreOffice Writer", WORD),
    ".pptx": ("a presentation of PowerPoint", SAVE),
    ".sav": ("an SPSS file", SPSS),
    ".por": ("an SPSS file", SPSS),
    ".dta": ("a Stata file", STATA),
    ".sas7bdat": ("a SAS file", SAS),
    ".rds": ("a file of R", R),
    ".rdata": ("a file of R", R),
    ".yml": ("YAML", YAML),
    ".yaml": ("YAML", YAML),
    ".gsheet": ("a link to a Google sheet, and not the sheet", SHEETS),
    ".webloc": ("a link to a web page", DOWNLOAD),
}
# By a name in a ZIP file.
PARTS = {
    r"word/document.xml": DOCUMENTS[".docx"],
    r"ppt/presentation.xml": DOCUMENTS[".pptx"],
    r"index\.apxl|Index/Slide.*\.iwa": DOCUMENTS[".key"],
    r"(.*/)?Index/.*\.iwa|(.*/)?Index\.zip": DOCUMENTS[".numbers"],
    r"META-INF/container.xml": ("an e-book", SAVE),
    r"content.xml": DOCUMENTS[".odt"],
}
WORKBOOK_PARTS = ("xl/workbook.xml", "xl/workbook.bin")
SPREADSHEET = b"application/vnd.oasis.opendocument.spreadsheet"


def is_workbook(content: Content) -> bool:
    """Return whether a file is a spreadsheet that can be read: .xlsx, .xlsb, .xls or .ods."""
    start = content.start(START_BYTES)
    if start.startswith(b"\xd0\xcf\x11\xe0"):
        return content.suffix not in DOCUMENTS
    names = _names_in(content)
    if "mimetype" in names:
        with content.open() as file, ZipFile(file) as archive:
            return archive.read("mimetype").startswith(SPREADSHEET)
    return any(part in names for part in WORKBOOK_PARTS)


def reject_foreign(content: Content) -> None:
    """Raise an error that says what a file is, if it is known and can't be read."""
    start = content.start(START_BYTES)
    is_named = not _is_text(start) or content.suffix in (".yml", ".yaml")
    known = DOCUMENTS.get(content.suffix) if is_named else None
    if names := _names_in(content):
        kinds = (kind for part, kind in PARTS.items() if any(re.fullmatch(part, n) for n in names))
        known = known or next(kinds, ("a ZIP archive", UNPACK))
    elif start.startswith(ZIP):
        known = ("a damaged spreadsheet or ZIP archive", "copy, download or export it again")
    for beginning, kind in BEGINNINGS.items():
        if known is None and re.match(beginning, start):
            known = kind
    if known:
        what, remedy = known
        raise DataUnreadableError(
            f"{content.path} is {what}", remedy=remedy.replace("FILE", content.path.name)
        )


def _names_in(content: Content) -> list[str]:
    """Return the names in a ZIP file, none of another or a damaged one."""
    if not content.start(len(ZIP)).startswith(ZIP):
        return []
    try:
        with content.open() as file, ZipFile(file) as archive:
            return archive.namelist()
    except BadZipFile:
        return []


def _is_text(start: bytes) -> bool:
    return b"\0" not in start and not start.startswith((b"PK", b"{\\rtf", b"bplist"))
